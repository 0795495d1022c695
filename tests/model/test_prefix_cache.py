"""The prefix cache: equal answers, with most of the prompt cached."""

import asyncio
import gc
import json
import os
import shutil
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.protocol import PrefixCounts
from paceline.request.profile import Bypass
from tests.support.engine_answers import generation_for
from tests.support.engine_lane import run_until_idle
from tests.support.hostile_checkpoints import damaged_bytes, damaged_header
from tests.support.served_engine import running_engine
from workers.demo import CHECKPOINT
from workers.engine.decode.prefill import context_of
from workers.engine.prefix.cache import PrefixCache
from workers.engine.prefix.files import TTL_S, FileName, HostPrefix, PrefixCacheFiles
from workers.engine.prefix.fingerprint import ModelFiles
from workers.engine.prefix.tree import common_length
from workers.engine.text.tokenizer import PreparedPrompt
from workers.engine.types import Finished, LaneName, Prompt, Usage

SYSTEM = "You are the help desk of a small shop. " + "The red fox sees the old tree. " * 6
OTHER = "Be brief. " + "The blue boat finds the warm stone. " * 6
SECRET = b"secret"
QUESTIONS = ["Hello", "Count from 1 to 9.", "Who are you?"]


@pytest.fixture
def prefix_cache() -> PrefixCache:
    return PrefixCache(1 << 30)


@pytest.mark.parametrize("name", list(LaneName))
def test_a_hit_returns_the_same_answer_and_counts_as_a_miss(
    make_lane, ask, prefix_cache, name
) -> None:
    counts = PrefixCounts()
    for question in QUESTIONS:
        cold_lane = make_lane(name)
        cold = ask(cold_lane, question, system=SYSTEM)
        warm_lane = make_lane(name, prefix_cache=prefix_cache)
        warm = ask(warm_lane, question, system=SYSTEM)

        assert warm.row.answer == cold.row.answer
        assert warm.row.speculation.total() == cold.row.speculation.total()
        counts += warm_lane.counters.report().prefix
    assert (counts.hits, counts.misses) == (len(QUESTIONS) - 1, 1)


def test_a_drafting_row_can_use_the_prefix_of_a_plain_row(make_lane, ask, prefix_cache) -> None:
    lane = make_lane(prefix_cache=prefix_cache)
    ask(lane, "Hello", system=SYSTEM, bypass=(Bypass.LOGPROBS,))
    warm = ask(lane, "Who are you?", system=SYSTEM)
    cold_lane = make_lane()
    cold = ask(cold_lane, "Who are you?", system=SYSTEM)

    assert warm.row.cached_tokens > 0
    assert warm.row.speculation.total() == cold.row.speculation.total()


def test_two_lanes_share_a_single_read_of_a_prefix(make_lanes, submit, prefix_cache) -> None:
    lanes = make_lanes(prefix_cache=prefix_cache, chunk_tokens=32)
    results = [submit(lane, "Hello", system=SYSTEM) for lane in lanes]
    run_until_idle(*lanes)

    assert [result.row.cached_tokens > 0 for result in results] == [False, True]
    counts = sum((lane.counters.report().prefix for lane in lanes), PrefixCounts())
    assert (counts.hits, counts.misses) == (1, 1)


def test_cached_prefixes_use_no_more_memory_than_reported(make_lane, ask) -> None:
    """A view would keep its whole array in memory: all states of a chunk for the last one."""
    prefix_cache = PrefixCache(1 << 30)
    lane = make_lane(prefix_cache=prefix_cache)

    def active_bytes(system: str) -> int:
        ask(lane, "Hello", system=system, max_tokens=2)
        mx.synchronize()
        return int(mx.get_active_memory())

    before_bytes, reported_before_bytes = active_bytes(SYSTEM), prefix_cache.size_bytes
    used_bytes = active_bytes(OTHER * 2) - before_bytes
    reported_bytes = prefix_cache.size_bytes - reported_before_bytes

    assert reported_bytes > 1 << 17
    assert used_bytes == pytest.approx(reported_bytes, abs=1 << 16)


@pytest.fixture
def files(tmp_path: Path) -> PrefixCacheFiles:
    return PrefixCacheFiles(tmp_path, 1 << 30, "model", SECRET)


NAME = FileName(0, 4, "ab" * 16, resumable=True, scope="cd" * 8)


def run_after_restart(make_lane, submit, files: PrefixCacheFiles, question: str = "Who are you?"):
    """Answer a question in a lane with an empty memory, as after a restart."""
    prefix_cache = PrefixCache(1 << 30, PrefixCacheFiles(*files_arguments(files)))
    lane = make_lane(prefix_cache=prefix_cache)
    result = submit(lane, question, system=SYSTEM)
    prompt = result.row.prompt
    result.row.prefetched = prefix_cache.prefetch(prompt.scope, prompt.identity)
    run_until_idle(lane)
    prefix_cache.close()
    return result


def files_arguments(files: PrefixCacheFiles) -> tuple[Path, int, str, bytes]:
    return files._directory, files._limit_bytes, files._model, files._secret


def load_all(files: PrefixCacheFiles) -> list[HostPrefix]:
    """Return what a restarted worker can read."""
    restarted = PrefixCacheFiles(*files_arguments(files))
    loaded = [restarted.load(name) for name in list(restarted._names.values())]
    return [prefix for prefix in loaded if prefix is not None]


def test_a_prefix_on_disk_survives_a_restart(make_lane, submit, files) -> None:
    cold = run_after_restart(make_lane, submit, files)
    warm = run_after_restart(make_lane, submit, files)

    assert (cold.row.cached_tokens, warm.row.cached_tokens > 32) == (0, True)
    assert warm.row.answer == cold.row.answer
    assert warm.row.speculation.total() == cold.row.speculation.total()


def test_a_damaged_file_is_a_miss_and_is_removed(make_lane, submit, files, tmp_path) -> None:
    expected = run_after_restart(make_lane, submit, files)
    for path in tmp_path.glob("*.safetensors"):
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_bytes(path.read_bytes()[:-8] + bytes(8))

    assert load_all(files) == []
    assert not list(tmp_path.glob("*.safetensors"))
    second = run_after_restart(make_lane, submit, files)
    assert (second.row.cached_tokens, second.row.answer) == (0, expected.row.answer)


def test_l8_a_file_of_somebody_without_the_secret_is_never_used(
    make_lane, submit, files, tmp_path
) -> None:
    """A writer of the folder could otherwise plant another system prompt."""
    planted = PrefixCacheFiles(tmp_path, 1 << 30, "model", b"another secret")
    run_after_restart(make_lane, submit, planted)

    assert load_all(files) == []
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    "other",
    [
        NAME._replace(digest="ef" * 16),
        NAME._replace(scope="12" * 8),
        NAME._replace(begin=1),
        NAME._replace(end=5),
        NAME._replace(resumable=False),
    ],
    ids=["another prompt", "another scope", "another begin", "another end", "another state"],
)
def test_l8_a_file_under_the_name_of_another_run_is_never_used(files, other: FileName) -> None:
    """A writer of the folder could otherwise give a client the prompt of another one."""
    files.save(NAME, HostPrefix(arrays={"tokens": np.zeros(4, np.int32)}, bfloat16=frozenset()))
    assert files.load(NAME) is not None
    files._path(other).write_bytes(files._path(NAME).read_bytes())
    assert files.load(other) is None
    assert not files._path(other).exists()
    assert files.load(NAME) is not None
    of_another_model = PrefixCacheFiles(files._directory, 1 << 30, "another model", SECRET)
    assert of_another_model.load(NAME) is None


def test_l8_arrays_under_other_names_are_a_miss(files) -> None:
    names = ("tokens", "attention.x.y")
    arrays = {name: np.zeros(4, np.int32) for name in names}
    files.save(NAME, HostPrefix(arrays=arrays, bfloat16=frozenset({"hidden"})))
    loaded = files.load(NAME)
    assert loaded is not None
    prefix_cache = PrefixCache(1 << 30, files)
    prefix_cache.insert("", np.zeros(8, np.int64), [(NAME, loaded)])
    assert prefix_cache.size_bytes == 0


@settings(max_examples=30, suppress_health_check=list(HealthCheck), database=None)
@given(change=st.data())
def test_l8_a_hostile_file_is_skipped_and_never_raises(tmp_path_factory, change) -> None:
    folder = tmp_path_factory.mktemp("files")
    files = PrefixCacheFiles(folder, 1 << 16, "model", SECRET)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "tokens": np.arange(40, dtype=np.int32),
        "hidden": np.zeros((4, 4), np.uint16),
    }
    files.save(NAME, HostPrefix(arrays=arrays, bfloat16=frozenset({"hidden"})))
    (path,) = folder.glob("*.safetensors")
    content = path.read_bytes()
    damaged, _ = change.draw(damaged_header(content) | damaged_bytes(content))
    path.write_bytes(damaged)

    loaded = files.load(NAME)
    if loaded is None:
        assert not path.exists()
    else:  # nothing that the file says was changed
        assert np.array_equal(loaded.arrays["tokens"], arrays["tokens"])
        assert np.array_equal(loaded.arrays["hidden"], arrays["hidden"])
        assert loaded.bfloat16 == {"hidden"}


def test_l8_a_folder_in_the_place_of_a_file_is_a_miss(files, tmp_path) -> None:
    files.save(NAME, HostPrefix(arrays={"tokens": np.zeros(4, np.int32)}, bfloat16=frozenset()))
    (path,) = tmp_path.glob("*.safetensors")
    path.unlink()
    path.mkdir()
    assert files.load(NAME) is None


def test_the_bytes_written_in_a_day_are_bounded_over_restarts(tmp_path) -> None:
    host = HostPrefix(arrays={"tokens": np.zeros(100)}, bfloat16=frozenset())
    saved = []
    for number in range(30):
        files = PrefixCacheFiles(tmp_path, 8192, "model", SECRET)
        name = NAME._replace(end=5 + number)
        files.save(name, host)
        saved.append(name in files)
    assert saved == sorted(saved, reverse=True)
    assert sum(saved) == 4 * 8192 // 2080, "of 800 bytes, and of a header at most"


def test_a_scope_is_dropped_from_memory_and_disk(make_lane, submit, tmp_path) -> None:
    files = PrefixCacheFiles(tmp_path, 1 << 30, "model", SECRET)
    prefix_cache = PrefixCache(1 << 30, files)
    lane = make_lane(prefix_cache=prefix_cache)
    prompts = {}
    for scope in ("one", "two"):
        prompts[scope] = replace(submit(lane, "Hello", system=SYSTEM).row.prompt, scope=scope)
    run_until_idle(lane)
    for prompt in prompts.values():
        submit(lane, prompt)
    run_until_idle(lane)
    for scope, prompt in prompts.items():
        prefix_cache.flush()
        assert prefix_cache.match(scope, prompt.identity, with_head=True, cuttable=False)
    late = submit(lane, prompts["one"], max_tokens=20)
    lane.step()
    lane.stop_caching("one")
    prefix_cache.drop("one").result()
    run_until_idle(lane)
    prefix_cache.flush()

    assert late.row.answer
    found = {
        scope: (
            prefix_cache.match(scope, prompt.identity, with_head=True, cuttable=False) is not None,
            bool(files.find(scope, prompt.identity, 0)),
        )
        for scope, prompt in prompts.items()
    }
    assert found == {"one": (False, False), "two": (True, True)}
    assert prefix_cache.size_bytes == sum(node.size_bytes for node in prefix_cache._nodes())
    prefix_cache.drop(None).result()
    assert prefix_cache.size_bytes == 0
    assert not list(tmp_path.glob("*.safetensors"))
    prefix_cache.close()


def test_what_is_evicted_next_is_on_disk_before(make_lane, ask, tmp_path, monkeypatch) -> None:
    """Eviction itself writes little: its memory is needed at once."""
    monkeypatch.setattr("workers.engine.prefix.cache._PENDING_BYTES", 1 << 20)
    files = PrefixCacheFiles(tmp_path, 1 << 30, "model", SECRET)
    prefix_cache = PrefixCache(3 << 20, files)
    lane = make_lane(prefix_cache=prefix_cache)
    contexts = []
    for number in range(1, 12):
        tokens = tuple(20 + (at * number) % 700 for at in range(300))
        row = ask(lane, PreparedPrompt(tokens=tokens, scope=""), max_tokens=2).row
        contexts.append(np.append(context_of(row), 5))
        prefix_cache._writer.submit(lambda: None).result()
    evicted = [
        tokens
        for tokens in contexts
        if not prefix_cache.match("", tokens, with_head=True, cuttable=False)
    ]
    assert 2 < len(evicted) < 10
    assert all(files.find("", tokens, 0) for tokens in evicted)
    prefix_cache.close()


def test_a_waiting_row_gets_from_disk_what_others_have_evicted(make_lane, submit, tmp_path) -> None:
    def prompt(number: int, *further: int) -> PreparedPrompt:
        tokens = tuple(20 + (at * number + 99 * number) % 700 for at in range(300))
        return PreparedPrompt(tokens=(*tokens, *further), scope="")

    files = PrefixCacheFiles(tmp_path, 1 << 30, "model", SECRET)
    prefix_cache = PrefixCache(1 << 30, files)
    lane = make_lane(prefix_cache=prefix_cache, max_rows=1)
    begun = submit(lane, prompt(1), max_tokens=2).row
    run_until_idle(lane)
    prefix_cache.limit_bytes = int(1.5 * prefix_cache.size_bytes)
    rows = [submit(lane, prompt(number), max_tokens=2).row for number in (3, 7)]
    rows += [submit(lane, prompt(1, *begun.answer, *range(50)), max_tokens=2).row for _ in range(2)]
    assert rows[-1].held_tokens >= 290
    dropped = submit(lane, prompt(1, *begun.answer, 50), max_tokens=2).row
    dropped.cancelled = True
    run_until_idle(lane)
    assert [row.cached_kinds.get("disk", 0) > 290 for row in rows[:3]] == [False, False, True]
    assert [row.cached_tokens > 290 for row in rows] == [False, False, True, True]
    assert dropped.reloading is None
    prefix_cache.close()


async def test_chats_at_once_find_on_disk_what_memory_has_no_room_for(tmp_path) -> None:
    options = {"prefix_cache_dir": tmp_path, "prefix_cache_secret": SECRET}
    with running_engine(prefix_cache_bytes=2_000_000, **options) as engine:
        chats = [[{"role": "user", "content": f"{at} {SYSTEM * 5}"}] for at in range(8)]

        async def next_turn(chat: list[dict[str, str]]) -> Usage:
            text = engine.prompts.chat(chat)
            prompt = Prompt(text=text, scope="", turn_end=engine.prompts.turn_end(text, chat))
            wanted = generation_for(engine, "", prompt=prompt, max_tokens=4)
            async with aclosing(engine.generate(wanted)) as events:
                *_, end = [event async for event in events]
            assert isinstance(end, Finished)
            chat += [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
            return end.usage

        first, second = [await asyncio.gather(*map(next_turn, chats)) for _ in range(2)]
        held_bytes = engine.prefix_cache.size_bytes
    known = sum(one.prompt_tokens for one in first)
    assert held_bytes < 2_000_000 < known * 1000, "they do not fit into memory"
    assert sum(one.cached_tokens for one in second) > 0.95 * (known - 8 * 8)


@pytest.mark.parametrize("changed", [1, 3, 5])
def test_each_message_of_a_prompt_that_is_read_at_once_is_a_checkpoint(
    make_lane, submit, prompt_renderer, prefix_cache, changed: int
) -> None:
    def prompt(texts: list[str]) -> PreparedPrompt:
        roles = ("user", "assistant")
        chat = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
        text = prompt_renderer.chat(chat)
        end = prompt_renderer.turn_end(text, chat)
        return prompt_renderer.prepare(Prompt(text=text, turn_end=end, scope=""))

    lane = make_lane(prefix_cache=prefix_cache)
    texts = [f"{at} " + "The red fox sees the old tree. " * 60 for at in range(7)]
    whole = submit(lane, prompt(texts), max_tokens=1).row
    run_until_idle(lane)
    fork = submit(lane, prompt([*texts[:changed], "Who are you?"]), max_tokens=1).row
    run_until_idle(lane)
    shared = common_length(whole.prompt.identity, fork.prompt.identity)
    assert shared > 200 * changed
    assert shared - fork.cached_tokens < 8
    assert len(list(prefix_cache._nodes())) <= 2 * 8


def test_files_read_ahead_are_bounded_and_their_reading_is_cancelled(
    make_lane, submit, files
) -> None:
    result = run_after_restart(make_lane, submit, files)
    prompt = result.row.prompt
    prefix_cache = PrefixCache(1 << 30, PrefixCacheFiles(*files_arguments(files)))
    assert prefix_cache.prefetch(prompt.scope, prompt.identity, lambda: True) == []
    runs = prefix_cache.prefetch(prompt.scope, prompt.identity)
    assert prefix_cache._prefetched_bytes == sum(host.size_bytes for _, host in runs) > 0
    prefix_cache.limit_bytes = prefix_cache._prefetched_bytes
    assert prefix_cache.prefetch(prompt.scope, prompt.identity) == []
    del runs
    gc.collect()
    assert prefix_cache._prefetched_bytes == 0
    prefix_cache.close()


def test_files_that_nobody_used_for_a_week_are_deleted(tmp_path) -> None:
    files = PrefixCacheFiles(tmp_path, 1 << 20, "model", SECRET)
    old, new = NAME, NAME._replace(end=5)
    for name in (old, new):
        files.save(name, HostPrefix(arrays={"tokens": np.zeros(4)}, bfloat16=frozenset()))
    week_ago_s = time.time() - TTL_S - 1
    os.utime(files._path(old), (week_ago_s, week_ago_s))

    restarted = PrefixCacheFiles(tmp_path, 1 << 20, "model", SECRET)
    assert (old in restarted, new in restarted) == (False, True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_a_running_worker_neither_finds_nor_renews_what_nobody_used_for_a_week(files) -> None:
    tokens = np.arange(4, dtype=np.int64)
    names = [files.name("", tokens[:end], end - 2, resumable=True) for end in (2, 4)]
    for name in names:
        files.save(name, HostPrefix(arrays={"tokens": np.zeros(2)}, bfloat16=frozenset()))
    longer = np.append(tokens, 4)
    assert files.find("", longer, 0) == names
    week_ago_s = time.time() - TTL_S - 1
    for path, left in ((files._path(names[1]), names[:1]), (files._path(names[0]), [])):
        os.utime(path, (week_ago_s, week_ago_s))
        found = files.find("", longer, 0)
        assert found == left
    assert names[0] not in files, "so that it is written again"
    files._names[2, names[0].digest] = names[0]
    assert files.load(names[0]) is None
    assert files._path(names[0]).stat().st_mtime == week_ago_s


def test_workers_of_one_folder_share_its_limits_and_see_what_others_evict(tmp_path) -> None:
    host = HostPrefix(arrays={"tokens": np.zeros(100)}, bfloat16=frozenset())
    first, second = (PrefixCacheFiles(tmp_path, 6000, "model", SECRET) for _ in range(2))
    names = [NAME._replace(end=5 + number) for number in range(13)]
    partial = tmp_path / "other.partial"
    partial.write_bytes(bytes(2500))
    for number, name in enumerate(names):
        (first, second)[number % 2].save(name, host)
        assert sum(path.stat().st_size for path in tmp_path.glob("*l*")) <= 6000
    assert (names[0] in first, first.load(names[0])) == (False, None), "it has evicted that one"
    assert (names[9] in second, names[10] in first) == (True, True)
    assert (names[11] in second, names[12] in first) == (False, False), "a day allows no more"
    os.utime(partial, (1, 1))
    PrefixCacheFiles(tmp_path, 6000, "model", SECRET)
    assert not partial.exists(), "its writer has ended"


def test_a_writer_that_is_stopped_holds_up_no_other_one(tmp_path, monkeypatch) -> None:
    first, second = (PrefixCacheFiles(tmp_path, 1 << 20, "model", SECRET) for _ in range(2))
    monkeypatch.setattr("workers.engine.prefix.files._LOCK_S", 0.0)
    with first._lock():
        second.save(NAME, HostPrefix(arrays={"tokens": np.zeros(4)}, bfloat16=frozenset()))
    assert NAME in second


def test_the_keys_of_prompts_survive_a_restart_with_their_files(make_lane, submit, files) -> None:
    prefix_cache = PrefixCache(1 << 30, files)
    lane = make_lane(prefix_cache=prefix_cache)
    prompt = submit(lane, "Who are you?", system=SYSTEM).row.prompt
    run_until_idle(lane)
    prefix_cache.name_turn(prompt.scope, prompt.identity[: prompt.turn_tokens], "turn")
    keys = set(prefix_cache.keys)
    prefix_cache.close()
    assert keys == {prompt.prefix.key, "turn"}

    restarted = PrefixCacheFiles(*files_arguments(files))
    again = PrefixCache(1 << 30, restarted)
    assert set(again.keys) == keys
    for name in list(restarted._names.values()):
        restarted._path(name).unlink()
        assert name not in restarted
    assert again.keys == ()
    again.close()


@pytest.mark.parametrize("keys", [["a" * 129], ["a b", "\n"], [str(at) for at in range(99)], [7]])
def test_l8_the_keys_of_a_hostile_file_are_bounded(files, keys: list[Any]) -> None:
    files.save(NAME, HostPrefix(arrays={"tokens": np.zeros(4)}, bfloat16=frozenset()))
    header = json.dumps({"__metadata__": {"keys": ",".join(map(str, keys)) if keys != [7] else 7}})
    files._path(NAME).write_bytes(len(header).to_bytes(8, "little") + header.encode())
    found = list(PrefixCacheFiles(*files_arguments(files)).keys)
    assert found == [str(at) for at in range(16)] * (len(keys) == 99)


def test_a_disk_that_takes_no_file_is_logged_once(tmp_path, caplog) -> None:
    files = PrefixCacheFiles(tmp_path, 1 << 20, "model", SECRET)
    tmp_path.rmdir()
    for end in (4, 5):
        host = HostPrefix(arrays={"tokens": np.zeros(4)}, bfloat16=frozenset())
        files.save(NAME._replace(end=end), host)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "prefix_cache.write_failed"
    ]


@pytest.mark.parametrize("share", [0.0, 0.37, 0.5, 1.0])
def test_checkpoints_with_any_other_byte_have_other_fingerprints(tmp_path, share: float) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "other")
    weights = tmp_path / "other" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1
    before = ModelFiles(tmp_path / "other").fingerprint()
    weights.write_bytes(data)
    after = ModelFiles(tmp_path / "other").fingerprint()

    assert ModelFiles(CHECKPOINT).fingerprint() == before
    assert before is not None
    assert not {*before} & {*(after or before)}


def test_weights_are_read_once_until_a_file_changes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("workers.engine.prefix.fingerprint.AT_ONCE_BYTES", 0)
    kept, weights = tmp_path / "digests.json", tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100))
    first = ModelFiles(tmp_path, kept=kept)

    assert first.fingerprint() is None
    assert first.read(lambda: True) is None
    assert not kept.exists()
    known = first.read()
    assert known is not None
    assert ModelFiles(tmp_path, kept=kept).fingerprint() == known
    os.utime(weights, ns=(1, 1))
    assert ModelFiles(tmp_path, kept=kept).fingerprint() is None
    kept.write_text("[1]")
    changed = ModelFiles(tmp_path, kept=kept)
    weights.write_bytes(bytes(101))
    assert changed.read() is None
    assert ModelFiles(tmp_path, kept=kept).read() != known


def test_a_lane_reports_its_speed_and_pending_tokens(make_lane, submit, prefix_cache) -> None:
    """Cached tokens of a queued prompt are not pending."""
    lane = make_lane(prefix_cache=prefix_cache)
    first = submit(lane, "Hello", system=SYSTEM)
    waiting = lane.counters.report()
    assert (waiting.prefill_tokens_per_s, waiting.decode_tokens_per_s) == (0, 0)
    assert waiting.pending_prefill_tokens == len(first.row.prompt.tokens)
    run_until_idle(lane)
    idle = lane.counters.report()
    assert idle.pending_prefill_tokens == 0
    assert min(idle.prefill_tokens_per_s, idle.decode_tokens_per_s) > 0

    second = submit(lane, "Who are you?", system=SYSTEM)
    prefix = second.row.prompt.prefix
    assert prefix is not None
    assert prefix_cache.keys == (prefix.key,)
    unread = len(second.row.prompt.tokens) - prefix.tokens
    assert lane.counters.report().pending_prefill_tokens == unread
