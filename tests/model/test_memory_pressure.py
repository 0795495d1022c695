"""Failed allocations and memory pressure: rows wait or are read again, and no answer changes."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from paceline.lifecycle import TRIM_INTERVAL_S
from paceline.request.profile import Sampling
from tests.model.test_engine import collect, make_generation
from tests.support.engine_lane import RowEvents, run_until_idle
from tests.support.reference_decoder import assert_matches_reference
from workers.engine.decode.memory_pressure import MemoryMonitor, MemoryReading
from workers.engine.engine import Engine
from workers.engine.lane import thread as thread_module
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.lane.thread import EngineThread
from workers.engine.model.device import limit_freed_buffers, limit_memory, memory_limit_bytes
from workers.engine.prefix.cache import PrefixCache
from workers.engine.types import Finished, GenerationFailed, MemoryShort

QUESTIONS = [
    "Count from 1 to 20.",
    "Tell me a story about a fox.",
    "Who are you?",
    "Tell me a story.",
]
OUT_OF_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)


class Device:
    """Fails chosen evaluations for lack of memory, as Metal does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures = 0
        """Evaluations that will fail from now on."""
        self.cleared = 0
        for name in ("eval", "async_eval"):
            monkeypatch.setattr(mx, name, self._failing(getattr(mx, name)))
        clear = mx.clear_cache

        def clear_cache() -> None:
            self.cleared += 1
            clear()

        monkeypatch.setattr(mx, "clear_cache", clear_cache)

    def _failing(self, evaluate: Callable[..., None]) -> Callable[..., None]:
        def evaluate_or_fail(*results: Any) -> None:
            if self.failures:
                self.failures -= 1
                raise RuntimeError(OUT_OF_MEMORY)
            evaluate(*results)

        return evaluate_or_fail


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def rows_with_caches(lane: LaneScheduler) -> list[Any]:
    return [row for rows in lane.rows_by_batch() for row in rows]


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_a_failed_allocation_sends_back_all_rows_and_the_oldest_is_read_first(
    checkpoint, make_lane, submit, device, draft_tokens
) -> None:
    monitor = MemoryMonitor()
    lane = make_lane(monitor=monitor)
    results = [
        submit(lane, question, draft_tokens=draft_tokens, max_tokens=20) for question in QUESTIONS
    ]
    while lane.running_rows < len(results):
        lane.step()
    prefix = [list(result.row.answer) for result in results]
    device.failures = 1
    lane.step()

    assert list(lane._waiting) == [result.row for result in results], "in the order of arrival"
    assert monitor.failed_allocations == 1
    assert device.cleared == 1
    run_until_idle(lane)
    assert_matches_reference(checkpoint, *results)
    for before, result in zip(prefix, results, strict=True):
        assert result.row.answer[: len(before)] == before
        assert result.row.draft_tokens == draft_tokens, "no row is to blame"
    report = lane.counters.report()
    assert report.head_healthy
    assert report.bypass_counts == {}


def test_a_failed_allocation_of_one_batch_keeps_the_oldest_row_of_another_alone(
    checkpoint, make_lanes, submit, device
) -> None:
    lanes = make_lanes(monitor=MemoryMonitor())
    first, *others = (
        submit(lanes[at % 2], question, max_tokens=20, draft_tokens=2 - at % 2 * 2)
        for at, question in enumerate(QUESTIONS)
    )
    for lane in reversed(lanes):  # the batch without drafts comes first
        while not lane.running_rows or lane.waiting_rows or lane.prefills:
            lane.step()
    device.failures = 1
    lanes[1].step()

    assert [row for lane in lanes for row in rows_with_caches(lane)] == [first.row]
    assert lanes[0].running_rows == 1, "it goes on with its caches"
    run_until_idle(*lanes)
    assert_matches_reference(checkpoint, first, *others)


def test_a_failed_allocation_while_a_prompt_is_read_sends_back_the_younger_rows(
    checkpoint, make_lane, submit, device
) -> None:
    cache = PrefixCache(1 << 30)
    lane = make_lane(prefix_cache=cache, chunk_tokens=64)
    system = "You are a clerk of few words. " * 6
    results = [submit(lane, QUESTIONS[0], system=system, max_tokens=4)]
    run_until_idle(lane)
    results.append(submit(lane, QUESTIONS[1], max_tokens=20))
    for _ in range(4):
        lane.step()
    assert cache.size_bytes
    results.append(submit(lane, QUESTIONS[2], system="You are a sailor. " * 20, max_tokens=8))
    lane.finish_open_steps()  # reading the prompt is then the first work of the device
    device.failures = 1
    lane.step()

    assert rows_with_caches(lane) == [results[1].row], "the oldest one goes on"
    assert list(lane._waiting) == [results[2].row]
    assert cache.size_bytes == 0
    run_until_idle(lane)
    assert_matches_reference(checkpoint, *results)


def test_a_row_alone_is_read_once_more_and_then_ends_and_the_next_one_runs(
    make_lane, submit, device
) -> None:
    lane = make_lane(max_rows=1)
    failing, next_one = submit(lane, QUESTIONS[0]), submit(lane, QUESTIONS[3])
    lane.step()
    device.failures = 1
    lane.step()
    assert failing.end is None
    assert failing.row.starved
    device.failures = 1
    lane.step()

    assert isinstance(failing.end, GenerationFailed)
    assert "Memory" not in str(failing.end)
    run_until_idle(lane)
    assert isinstance(next_one.end, Finished)


def test_allocations_that_fail_again_and_again_leave_fewer_rows_until_all_have_answered(
    checkpoint, make_lane, submit, device
) -> None:
    monitor = MemoryMonitor()
    lane = make_lane(monitor=monitor)
    results = [submit(lane, question, max_tokens=12) for question in QUESTIONS * 2]
    most = 8
    while lane.busy:
        lane.step()
        if lane.running_rows > 2:
            most = lane.running_rows
            device.failures = 1
    assert most < 8
    assert monitor.failed_allocations > 1
    assert_matches_reference(checkpoint, *results)


class Memory:
    """Readings that a test sets, taken anew each time."""

    def __init__(self, share: float = 0.5) -> None:
        self.share = share
        self.now_s = 0.0
        self.monitor = MemoryMonitor(self.read, self.clock)

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def read(self) -> MemoryReading:
        return MemoryReading(used_bytes=int(self.share * 10**9), limit_bytes=10**9)


def answered(results: list[RowEvents]) -> int:
    return sum(isinstance(result.end, Finished) for result in results)


@pytest.mark.parametrize("share", [0.86, 0.97])
def test_rows_wait_from_85_percent_on_and_one_alone_always_runs(make_lane, submit, share) -> None:
    memory = Memory(share)
    lane = make_lane(monitor=memory.monitor)
    results = [submit(lane, "Hello", max_tokens=12) for _ in range(4)]
    most = 0
    while answered(results) < 2:
        lane.step()
        most = max(most, len(rows_with_caches(lane)))
    assert most == 1
    memory.share = 0.84
    lane.step()
    assert len(rows_with_caches(lane)) == 2


def test_caches_are_given_back_from_85_percent_on_as_far_as_needed(make_lane, ask, device) -> None:
    memory, cache = Memory(), PrefixCache(1 << 30)
    lane = make_lane(monitor=memory.monitor, prefix_cache=cache)
    for at in range(4):
        system = f"You are clerk number {at} of this office. " * 6
        ask(lane, "Hello", system=system, max_tokens=2)
    before_bytes = cache.size_bytes
    excess_bytes = before_bytes // 3
    memory.share = 0.85 + excess_bytes / 10**9
    device.cleared = 0
    lane._admission.relieve()

    assert 0 < cache.size_bytes <= before_bytes - excess_bytes
    assert device.cleared == 2, "freed buffers are given back before and after"
    result = ask(lane, "Hello", system="You are a sailor of the seven seas. " * 6, max_tokens=2)
    assert isinstance(result.end, Finished)
    assert result.row.stored_tokens == 0, "nothing is stored meanwhile"
    memory.share = 0.95
    lane._admission.relieve()
    assert cache.size_bytes == 0


def test_relief_is_given_once_for_each_reading(make_lane, ask, device) -> None:
    memory = Memory(0.9)
    memory.clock = lambda: 0.0  # type: ignore[method-assign]
    monitor = MemoryMonitor(memory.read, memory.clock)
    lane = make_lane(monitor=monitor)
    ask(lane, "Hello", max_tokens=8)

    assert device.cleared == 2


async def test_requests_are_refused_from_95_percent_on_and_an_idle_engine_gives_back_its_caches(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    monkeypatch.setattr(engine, "monitor", memory.monitor)
    monkeypatch.setattr(engine.admission, "monitor", memory.monitor)
    prompt = [{"role": "system", "content": "You are a clerk of few words. " * 12}]
    question = [*prompt, {"role": "user", "content": "Hello"}]
    generation = make_generation(engine, sampling=Sampling(temperature=0))
    text = engine.prompts.chat(question)
    with_system = make_generation(engine, prompt=type(generation.prompt)(text=text))
    await collect(engine, with_system)
    assert engine.prefix_cache.size_bytes > 0

    memory.share = 0.96
    with pytest.raises(MemoryShort) as raised:
        await collect(engine, generation)
    assert (raised.value.used_bytes, raised.value.limit_bytes) == (960_000_000, 10**9)
    await asyncio.wrap_future(engine.thread.call(lambda: None))
    assert engine.prefix_cache.size_bytes == 0
    memory.share = 0.5
    _, end = await collect(engine, generation)
    assert end.usage.completion_tokens > 0


def test_freed_buffers_are_given_back_after_a_long_prompt(
    make_lane, ask, device, monkeypatch
) -> None:
    monkeypatch.setattr("workers.engine.lane.scheduler._LONG_PROMPT_TOKENS", 256)
    lane = make_lane()
    short, long = ([20 + i % 700 for i in range(tokens)] for tokens in (255, 256))
    for prompt, cleared in ((short, 0), (long, 1)):
        device.cleared = 0
        result = ask(lane, prompt, max_tokens=2)
        assert isinstance(result.end, Finished)
        assert device.cleared == cleared


@pytest.mark.parametrize("old_system", [False, True])
def test_weights_are_wired_where_there_is_a_working_set_and_freed_buffers_are_limited(
    monkeypatch: pytest.MonkeyPatch, old_system: bool
) -> None:
    wired = []

    def set_wired_limit(limit_bytes: int) -> int:
        if old_system:
            raise RuntimeError("[set_wired_limit] requires macOS 15.0 or higher")
        wired.append(limit_bytes)
        return 0

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    limit_memory()
    assert not wired, "a CPU has no working set"
    assert mx.set_cache_limit(1 << 30) == min(2 << 30, memory_limit_bytes() // 10)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 8 << 30})
    limit_memory()
    assert wired == ([] if old_system else [8 << 30])
    assert mx.set_cache_limit(1 << 30) == int(0.1 * (8 << 30))


@pytest.mark.parametrize(
    ("loaded_mb", "largest_mb", "working_set_mb", "kept_mb"),
    [
        (7, 0, 8192, 32),
        (350, 0, 8192, 350),
        (350, 600, 8192, 600),
        (4096, 0, 8192, 819),
        (40_960, 0, 65_536, 2048),
    ],
)
def test_freed_buffers_take_as_much_as_the_weights_at_most(
    monkeypatch, loaded_mb, largest_mb, working_set_mb, kept_mb
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    monkeypatch.setattr(mx, "get_active_memory", lambda: loaded_mb << 20)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(
        mx, "device_info", lambda: {"max_recommended_working_set_size": working_set_mb << 20}
    )
    limit_freed_buffers(largest_mb << 20)
    assert limits[0] >> 20 == kept_mb


def test_n3_an_engine_trims_the_heap_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, trims = 1_000_000.0, list[float]()
    monkeypatch.setattr(thread_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(thread_module, "trim_heap", lambda: trims.append(now_s))
    thread = EngineThread()
    thread.start(lambda: (None, ()))
    for _ in range(25):
        thread.call(lambda: None).result(30)
        now_s += TRIM_INTERVAL_S / 10
    thread.stop(30)
    assert not thread.alive
    begun_s = 1_000_000.0
    assert trims == pytest.approx([begun_s + TRIM_INTERVAL_S, begun_s + 2 * TRIM_INTERVAL_S], abs=1)
