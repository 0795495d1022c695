"""The prefix cache in 8 bits: smaller nodes, the same starts, and the same answers but for ties."""

from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.engine_lane import run_until_idle
from tests.support.reference_decoder import assert_equal_but_for_ties
from workers.engine.prefix.cache import PrefixCache
from workers.engine.prefix.files import PrefixCacheFiles
from workers.engine.prefix.kv_quantization import dequantize, quantize, quantized_bytes
from workers.engine.startup.probes import probe_cache_layout
from workers.engine.types import Finished

SYSTEM = "You are the help desk of a small shop. " + "The red fox sees the old tree. " * 8
QUESTIONS = ("Hello", "Who are you?")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("width", [32, 96, 128])
def test_quantised_keys_and_values_are_smaller_and_nearly_equal(dtype, width) -> None:
    layer = tuple(mx.random.normal((1, 2, 40, width), key=mx.random.key(k)) for k in (1, 2))
    layer = tuple(array.astype(dtype) for array in layer)
    (kept,) = quantize([layer])
    restored = dequantize(kept)

    assert sum(array.nbytes for array in kept) == quantized_bytes(layer)
    assert quantized_bytes(layer) < 0.6 * sum(array.nbytes for array in layer)
    assert quantized_bytes(kept) == quantized_bytes(layer)
    for before, after in zip(layer, restored, strict=True):
        assert after.dtype == dtype
        spread = (before.max(axis=-1) - before.min(axis=-1)).max().item()
        # Half a step of 255, and what the type of scales and biases rounds.
        assert mx.abs(after.astype(mx.float32) - before.astype(mx.float32)).max() < spread / 120
    assert quantize([kept]) == [kept], "it is quantised once"


def test_a_width_without_groups_is_kept_as_it_is() -> None:
    layer = (mx.ones((1, 2, 40, 40)), mx.ones((1, 2, 40, 40)))
    assert quantize([layer]) == [layer]
    assert list(dequantize(layer)) == list(layer)
    assert quantized_bytes(layer) == 2 * layer[0].nbytes


def test_rows_start_from_quantised_prefixes_in_memory_and_on_disk_with_the_same_answers(
    checkpoint, make_lane, submit, ask, tmp_path: Path
) -> None:
    answers, sizes = {}, {}
    for quantized in (False, True):
        folder = tmp_path / str(quantized)
        folder.mkdir()
        files = PrefixCacheFiles(folder, 1 << 30, f"demo {quantized}", b"secret")
        cache = PrefixCache(1 << 30, files, quantized=quantized)
        lane = make_lane(prefix_cache=cache)
        ask(lane, "Hello", system=SYSTEM, max_tokens=2)
        (root,) = cache._roots.values()
        sizes[quantized] = next(root.below()).token_bytes
        warm = [submit(lane, question, system=SYSTEM, max_tokens=16) for question in QUESTIONS]
        run_until_idle(lane)
        cache.close()

        later = PrefixCache(1 << 30, files, quantized=quantized)
        lane = make_lane(prefix_cache=later)
        result = submit(lane, QUESTIONS[1], system=SYSTEM, max_tokens=16)
        prompt = result.row.prompt
        result.row.prefetched = later.prefetch(prompt.scope, prompt.identity)
        assert result.row.prefetched
        run_until_idle(lane)
        later.close()
        for row in (*warm, result):
            assert isinstance(row.end, Finished)
            assert row.row.cached_tokens > 32
        answers[quantized] = [row.row for row in (*warm, result)]

    # The demo model computes in float32 here, and its groups have 32 numbers.
    assert 0.3 < sizes[True] / sizes[False] < 0.35
    for exact, kept in zip(answers[False], answers[True], strict=True):
        assert_equal_but_for_ties(checkpoint, exact.prompt.tokens, exact.answer, kept.answer)


def test_workers_with_other_bits_are_of_another_model_for_the_exchange(checkpoint) -> None:
    digests = {
        probe_cache_layout(checkpoint.target, checkpoint.head, quantized=quantized).model_digest("")
        for quantized in (False, True)
    }
    assert len(digests) == 2
