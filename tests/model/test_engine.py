"""The engine on its thread, as the HTTP server of the worker uses it."""

import asyncio
from contextlib import aclosing
from typing import Any

import mlx.core as mx
import pytest

from paceline.request.profile import Sampling
from tests.support.engine_answers import collect, generation_for
from tests.support.worker_process import SUPPRESS_END_TOKENS
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine
from workers.engine.lane.memory import MemoryEstimate
from workers.engine.types import (
    EngineBusy,
    EngineSettings,
    EngineStopped,
    Finished,
    FinishReason,
    Generation,
    InvalidGeneration,
    LaneName,
    PrefillProgress,
    Prompt,
)

ENDLESS = Sampling(
    temperature=0,
    logit_bias=tuple((int(token), float(bias)) for token, bias in SUPPRESS_END_TOKENS.items()),
)


def make_generation(engine: Engine, question: str = "Hello", **changes: Any) -> Generation:
    return generation_for(engine, question, **{"max_tokens": 40, **changes})


async def test_a_seed_determines_the_text_and_no_seed_varies_it(engine: Engine) -> None:
    def generation(seed: int | None) -> Generation:
        sampling = Sampling(temperature=1.5, seed=seed)
        return make_generation(engine, "Tell me a story.", lane=LaneName.VLM, sampling=sampling)

    seeded = [await collect(engine, generation(7)) for _ in range(2)]
    free = await asyncio.gather(*(collect(engine, generation(None)) for _ in range(4)))

    assert seeded[0][0] == seeded[1][0]
    assert len({text for text, _ in free}) > 1


async def test_a_row_ends_when_its_reader_closes_the_stream(engine: Engine) -> None:
    async with aclosing(
        engine.generate(make_generation(engine, "Tell me a long story.", max_tokens=5000))
    ) as events:
        await anext(events)
    # A row of two tokens: by its end, at least one step has run since the stream was closed.
    await collect(engine, make_generation(engine, max_tokens=2))

    assert all(lane.running == lane.waiting == 0 for lane in engine.lane_reports())


async def test_a_long_prompt_reports_its_progress_before_the_first_text(engine: Engine) -> None:
    generation = make_generation(engine, "Hello there. " * 400, max_tokens=2)
    events = [event async for event in engine.generate(generation)]

    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert progress == events[: len(progress)]
    assert isinstance(events[-1], Finished)
    read = [0, *(event.read_tokens for event in progress), events[-1].usage.prompt_tokens]
    assert len(read) > 2
    assert read == sorted(set(read))


async def test_an_answer_ends_before_a_single_row_exceeds_the_memory(engine, monkeypatch) -> None:
    generation = make_generation(engine, max_tokens=None, sampling=ENDLESS)
    prompt_tokens = len(engine.prompts.prepare(generation.prompt).tokens)
    estimate = MemoryEstimate(token_bytes=1, row_bytes=0, room_bytes=256)
    monkeypatch.setattr(engine.admission, "memory", estimate)

    _, end = await collect(engine, generation)

    assert end.reason is FinishReason.LENGTH
    assert prompt_tokens + end.usage.completion_tokens == estimate.max_row_tokens() < 256


async def test_a_prompt_larger_than_the_memory_is_rejected_before_prefill(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = make_generation(engine, prompt=Prompt(text="story " * 300))
    estimate = MemoryEstimate(token_bytes=1, row_bytes=0, room_bytes=256)
    monkeypatch.setattr(engine.admission, "memory", estimate)

    with pytest.raises(InvalidGeneration) as raised:
        await collect(engine, generation)

    assert raised.value.code == "prompt_exceeds_memory"
    assert str(estimate.max_row_tokens()) in raised.value.message


async def test_a_full_queue_rejects_at_once_and_a_stop_ends_all_with_the_reason(engine) -> None:
    """Its two lanes share one copy of the weights, and it keeps few freed buffers."""
    before_bytes = engine.state().memory_bytes
    small = Engine.start(
        EngineSettings(model=CHECKPOINT, served_name="demo", max_rows=1, queue_limit=1)
    )
    try:
        for lane in LaneName:
            await collect(small, make_generation(small, lane=lane))
        assert small.card.lanes == (LaneName.TEXT_MTP, LaneName.VLM)
        assert small.state().memory_bytes - before_bytes < 1.5 * small.card.weights_bytes
        limit_bytes = max(mx.get_active_memory(), 32 << 20)
        for megabytes in range(1, 16):
            mx.eval(mx.zeros((megabytes, 1 << 20), dtype=mx.uint8))
        assert 0 < mx.get_cache_memory() <= limit_bytes + (16 << 20), "n3: whatever their sizes"

        endless = make_generation(small, max_tokens=5000, sampling=ENDLESS)
        running = [asyncio.create_task(collect(small, endless)) for _ in range(3)]
        while sum(lane.running + lane.waiting for lane in small.lane_reports()) < 3:
            await asyncio.sleep(0)
        with pytest.raises(EngineBusy):
            await asyncio.wait_for(collect(small, endless), 60)
    finally:
        await asyncio.to_thread(small.stop)

    ends = await asyncio.gather(*running, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineStopped] * 3
    assert not small.alive
    with pytest.raises(EngineStopped):
        await collect(small, endless)
