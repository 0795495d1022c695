"""Windows of sliding layers in the prefix cache: on disk, at another worker, and in a new row."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from bench.families.checkpoints import write_checkpoint
from bench.families.configs import family
from tests.support.engine_lane import run_until_idle
from workers.engine.engine import load_engine
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.prefix.cache import PrefixCache
from workers.engine.prefix.files import HostPrefix, PrefixCacheFiles
from workers.engine.prefix.transfer import PrefixQuery, TransferFailed
from workers.engine.prefix.tree import state_of
from workers.engine.startup.probes import probe_cache_layout
from workers.engine.text.tokenizer import PreparedPrompt
from workers.engine.types import EngineSettings, LaneName, ModelUnusable

WINDOW = 40
ROOM = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt-oss")
    write_checkpoint(path, family("gpt-oss"), window_tokens=WINDOW)
    return path


@pytest.fixture(scope="module")
def windowed(folder: Path) -> Checkpoint:
    return replace(load_checkpoint(folder), eos=frozenset())


def prompt(length: int) -> PreparedPrompt:
    tokens = tuple(100 + i * 7 % 900 for i in range(length))
    return PreparedPrompt(tokens=tokens, scope="", turn_tokens=length - 4)


def test_a_conversation_goes_on_from_disk(make_lane, submit, ask, windowed, tmp_path: Path) -> None:
    def lane(files: PrefixCacheFiles | None):
        cache = PrefixCache(ROOM if files else 0, files)
        parts = vars_of(windowed)
        return cache, make_lane(LaneName.VLM, draft_tokens=0, prefix_cache=cache, **parts)

    first = prompt(150)
    answers = []
    for restart in (False, True):
        cache, running = lane(PrefixCacheFiles(tmp_path, ROOM, "gpt-oss", b"secret"))
        result = submit(running, first, max_tokens=20)
        result.row.prefetched = tuple(cache.prefetch("", first.identity))
        run_until_idle(running)
        cache.close()
        assert (result.row.cached_tokens > 0) is restart
        answers.append(result.row.answer)
    _, running = lane(None)
    result = ask(running, first, max_tokens=20)
    assert answers == [result.row.answer] * 2


def vars_of(checkpoint: Checkpoint) -> dict[str, object]:
    return {"target": checkpoint.target, "head": None, "eos": frozenset()}


@pytest.mark.parametrize("tokens", [33, 40, 41, 120])
def test_a_node_of_another_worker_must_have_the_window_of_its_end(windowed, tokens) -> None:
    target = windowed.target
    layout = probe_cache_layout(target, None)
    ids = np.arange(100, 100 + tokens)
    caches = target.new_caches()
    target.forward(mx.array(ids)[None], caches, mx.arange(tokens)[None])
    cache = PrefixCache(ROOM)
    cache.store("", ids, state_of(caches, [], None), room_bytes=ROOM)
    run = cache.read_run("", ids, 0, tokens, ROOM)
    assert run is not None
    name, node = run.to_host()
    query = PrefixQuery(model="", scope="", tokens=ids, known=0, with_head=False, run_bytes=ROOM)
    layout.check((name, node), query, 0)
    windows = [key for key in node.arrays if key.startswith("window.")]
    assert len(windows) == 4, "keys and values of two layers"
    assert {node.arrays[key].shape[2] for key in windows} == {min(tokens, WINDOW)}
    for change in ({windows[0]: node.arrays[windows[0]][:, :, 1:]}, {windows[0]: None}):
        arrays = {
            key: array for key, array in {**node.arrays, **change}.items() if array is not None
        }
        with pytest.raises(TransferFailed):
            layout.check((name, HostPrefix(arrays=arrays, bfloat16=node.bfloat16)), query, 0)


def test_a_row_cannot_start_within_a_stored_run(make_lane, ask, windowed: Checkpoint) -> None:
    """A window is stored at the ends of messages alone, and there is none between them."""
    cache = PrefixCache(ROOM)
    lane = make_lane(LaneName.VLM, draft_tokens=0, prefix_cache=cache, **vars_of(windowed))
    first = prompt(150)
    ask(lane, first, max_tokens=20)
    forked = PreparedPrompt(tokens=(*first.tokens[:100], *range(50)), scope="", turn_tokens=148)
    result = ask(lane, forked, max_tokens=20)
    assert result.row.cached_tokens == 0
    other = make_lane(
        LaneName.VLM, draft_tokens=0, prefix_cache=PrefixCache(0), **vars_of(windowed)
    )
    alone = ask(other, forked, max_tokens=20)
    assert alone.row.answer == result.row.answer


def test_a_context_beyond_that_of_the_model_is_refused(folder: Path) -> None:
    settings = EngineSettings(model=folder, served_name="gpt-oss", context_tokens=131_073)
    with pytest.raises(ModelUnusable, match="longer than the 131072"):
        load_engine(settings)
