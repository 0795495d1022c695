"""The engine on its own thread, as the worker's HTTP face uses it."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from policies.request.profile import Sampling
from tests.support.worker_process import SUPPRESS_END_TOKENS
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine
from workers.engine.memory import MemoryEstimate
from workers.engine.types import (
    Delta,
    EngineBusy,
    EngineSettings,
    EngineStopped,
    Event,
    Finished,
    FinishReason,
    Generation,
    InvalidGeneration,
    LaneName,
    ModelUnusable,
    Picture,
    Prompt,
)

GREEDY = Sampling(temperature=0)
ENDLESS = Sampling(
    temperature=0,
    logit_bias=tuple((int(token), float(bias)) for token, bias in SUPPRESS_END_TOKENS.items()),
)
RED = Picture(width_px=64, height_px=64, rgb=bytes([220, 30, 30]) * 64 * 64)


def generation(engine: Engine, question: str = "Hello", **asked: object) -> Generation:
    prompt = Prompt(text=engine.prompts.chat([{"role": "user", "content": question}]))
    wish: dict[str, object] = {
        "request_id": "test",
        "lane": LaneName.TEXT_MTP,
        "prompt": prompt,
        "sampling": GREEDY,
        "max_tokens": 40,
    }
    return Generation(**{**wish, **asked})  # type: ignore[arg-type]


async def collect(engine: Engine, wish: Generation) -> tuple[str, Finished]:
    events: list[Event] = [event async for event in engine.generate(wish)]
    assert isinstance(events[-1], Finished)
    return "".join(event.text for event in events if isinstance(event, Delta)), events[-1]


async def test_two_lanes_hold_one_copy_of_the_weights(engine: Engine) -> None:
    before_bytes = engine.memory_bytes()
    second = Engine.start(EngineSettings(model=CHECKPOINT, served_name="demo"))
    try:
        for lane in LaneName:
            await collect(second, generation(second, lane=lane))

        assert second.card.lanes == (LaneName.TEXT_MTP, LaneName.VLM)
        assert second.memory_bytes() - before_bytes < 1.5 * second.card.weights_bytes
    finally:
        second.stop()


async def test_answers_are_the_same_alone_and_together_in_both_lanes(engine: Engine) -> None:
    questions = ["Hello", "Count from 1 to 20.", "Tell me a story.", "What is 2 + 2?"]
    wishes = [generation(engine, q, lane=lane) for q in questions for lane in LaneName]
    alone = [(await collect(engine, wish))[0] for wish in wishes]

    together = await asyncio.gather(*(collect(engine, wish) for wish in wishes))

    assert alone == [text for text, _ in together]


async def test_the_same_seed_gives_the_same_text_and_no_seed_gives_another(engine: Engine) -> None:
    def wish(seed: int | None) -> Generation:
        sampling = Sampling(temperature=1.5, seed=seed)
        return generation(engine, "Tell me a story.", lane=LaneName.VLM, sampling=sampling)

    seeded = [await collect(engine, wish(7)) for _ in range(2)]
    free = await asyncio.gather(*(collect(engine, wish(None)) for _ in range(4)))

    assert seeded[0][0] == seeded[1][0]
    assert len({text for text, _ in free}) > 1


async def test_a_row_is_gone_when_its_reader_leaves(engine: Engine) -> None:
    async with aclosing(
        engine.generate(generation(engine, "Tell me a long story.", max_tokens=5000))
    ) as events:
        await anext(events)
    # A row of two tokens: by its end, at least one step has passed since the other one left.
    await collect(engine, generation(engine, max_tokens=2))

    assert all(lane.running == lane.waiting == 0 for lane in engine.lane_reports())


async def test_counts_stand_in_the_report_before_the_answer_ends(engine: Engine) -> None:
    before = engine.lane_reports()[0]
    _, end = await collect(engine, generation(engine, "Count from 1 to 20."))
    after = engine.lane_reports()[0]

    assert after.requests == before.requests + 1
    assert after.completion_tokens == before.completion_tokens + end.usage.completion_tokens
    assert after.speculation.accepted == before.speculation.accepted + end.speculation.accepted


async def test_a_picture_is_read_with_its_own_positions(engine: Engine) -> None:
    message = {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Hi"}]}
    text = engine.prompts.chat([message])
    wish = generation(engine, lane=LaneName.VLM, prompt=Prompt(text=text, pictures=(RED,)))

    alone = await collect(engine, wish)
    beside = await asyncio.gather(
        collect(engine, wish),
        collect(engine, generation(engine, "Tell me a story.", lane=LaneName.VLM)),
        collect(engine, wish),
    )

    assert {text for text, _ in (beside[0], beside[2], alone)} == {alone[0]}
    assert alone[1].usage.prompt_tokens > 16


async def test_logprobs_are_those_of_the_chosen_tokens(engine: Engine) -> None:
    wish = generation(engine, lane=LaneName.VLM, top_logprobs=3, max_tokens=5)
    events = [event async for event in engine.generate(wish)]
    tokens = [token for event in events if isinstance(event, Delta) for token in event.logprobs]

    assert len(tokens) == events[-1].usage.completion_tokens  # type: ignore[union-attr]
    for token in tokens:
        assert len(token.top) == 3
        assert token.top[0].token_id == token.token_id, "greedy takes the likeliest"
        assert token.logprob == pytest.approx(token.top[0].logprob)
        assert token.logprob <= 0


async def test_a_prompt_longer_than_the_context_names_its_field(engine: Engine) -> None:
    wish = generation(engine, prompt=Prompt(text="story " * engine.card.context_tokens))

    with pytest.raises(InvalidGeneration) as raised:
        await collect(engine, wish)

    assert (raised.value.param, raised.value.code) == ("messages", "context_length_exceeded")


async def test_an_answer_ends_where_a_row_alone_would_outgrow_the_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = generation(engine, max_tokens=None, sampling=ENDLESS)
    prompt_tokens = len(engine.prompts.prepare(wish.prompt).tokens)
    estimate = MemoryEstimate(token_bytes=1, row_bytes=0, room_bytes=256)
    monkeypatch.setattr(engine, "_memory", estimate)

    _, end = await collect(engine, wish)

    assert end.reason is FinishReason.LENGTH
    assert prompt_tokens + end.usage.completion_tokens == estimate.max_row_tokens() < 256


async def test_a_prompt_that_fills_the_memory_alone_is_refused_before_it_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = generation(engine, prompt=Prompt(text="story " * 300))
    estimate = MemoryEstimate(token_bytes=1, row_bytes=0, room_bytes=256)
    monkeypatch.setattr(engine, "_memory", estimate)

    with pytest.raises(InvalidGeneration) as raised:
        await collect(engine, wish)

    assert raised.value.code == "prompt_exceeds_memory"
    assert str(estimate.max_row_tokens()) in raised.value.message


async def test_a_bias_on_a_token_outside_the_vocabulary_names_its_field(engine: Engine) -> None:
    wish = generation(engine, sampling=Sampling(temperature=0, logit_bias=((10**6, 1.0),)))

    with pytest.raises(InvalidGeneration) as raised:
        await collect(engine, wish)

    assert raised.value.param == "logit_bias"


async def test_a_full_queue_rejects_at_once() -> None:
    small = Engine.start(
        EngineSettings(model=CHECKPOINT, served_name="demo", max_rows=1, queue_limit=1)
    )
    try:
        running = [
            asyncio.create_task(
                collect(small, generation(small, "Tell me a long story.", max_tokens=2000))
            )
            for _ in range(3)
        ]
        while sum(lane.running + lane.waiting for lane in small.lane_reports()) < 3:
            await asyncio.sleep(0)
        with pytest.raises(EngineBusy):
            await collect(small, generation(small))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    finally:
        small.stop()


async def test_stopping_ends_running_generations_with_the_reason() -> None:
    mortal = Engine.start(EngineSettings(model=CHECKPOINT, served_name="demo"))
    events = mortal.generate(generation(mortal, "Tell me a long story.", max_tokens=5000))
    await anext(events)

    await asyncio.to_thread(mortal.stop)

    with pytest.raises(EngineStopped):
        async for _ in events:
            pass
    assert not mortal.alive
    with pytest.raises(EngineStopped):
        await collect(mortal, generation(mortal))


def test_a_directory_without_a_model_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="cannot be loaded"):
        Engine.start(EngineSettings(model=tmp_path, served_name="nothing"))


def test_lanes_that_cannot_run_leave_no_engine_behind(tmp_path: Path) -> None:
    for file in CHECKPOINT.iterdir():
        if file.name != "model-mtp.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.unlink(missing_ok=True)

    with pytest.raises(ModelUnusable, match="mtp"):
        Engine.start(
            EngineSettings(model=tmp_path, served_name="headless", lanes=(LaneName.TEXT_MTP,))
        )
