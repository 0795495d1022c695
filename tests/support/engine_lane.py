"""Lanes of the engine that a caller runs step by step, their rows, and the events of these."""

from dataclasses import dataclass, field
from typing import Any

from paceline.request.profile import Sampling
from workers.engine.decode.memory_pressure import MemoryMonitor
from workers.engine.decode.row import Row, SpeculationCounter
from workers.engine.lane.admission import Admission
from workers.engine.lane.memory import MemoryEstimate
from workers.engine.lane.scheduler import EngineParts, LaneScheduler
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.prefix.cache import PrefixCache
from workers.engine.text.detokenizer import TextStream
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import (
    Delta,
    EngineError,
    Event,
    Finished,
    Generation,
    LaneName,
    LaneSettings,
    PrefillProgress,
    Prompt,
    PromptScored,
    TokenLogprob,
)

GREEDY = Sampling(temperature=0)
UNLIMITED_MEMORY = MemoryEstimate(token_bytes=1, row_bytes=1, room_bytes=1 << 30)


@dataclass(eq=False)
class RowEvents:
    row: Row = field(init=False)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished | EngineError | None = None

    def on_event(self, event: Event | EngineError) -> None:
        assert self.end is None, "no event follows the end"
        if isinstance(event, Delta):
            self.text += event.text
            self.logprobs += event.logprobs
        elif not isinstance(event, PrefillProgress | PromptScored):
            self.end = event


def lanes_of(
    checkpoint: Checkpoint,
    prompts: PromptRenderer,
    *names: LaneName,
    draft_tokens: int = 2,
    max_rows: int = 8,
    chunk_tokens: int = 512,
    budget_s: float = 60.0,
    cache: PrefixCache | int = 0,
    memory: MemoryEstimate = UNLIMITED_MEMORY,
    monitor: MemoryMonitor | None = None,
    **parts: Any,
) -> list[LaneScheduler]:
    """Return the named lanes of one engine, which share a prefix cache of its own or this size."""
    shared = EngineParts(
        settings=LaneSettings(
            draft_tokens=draft_tokens,
            max_rows=max_rows,
            prefill_chunk_tokens=chunk_tokens,
            prefill_budget_s=budget_s,
        ),
        checkpoint=checkpoint,
        prompts=prompts,
        admission=Admission(
            checkpoint.target,
            memory,
            PrefixCache(cache) if isinstance(cache, int) else cache,
            monitor,
        ),
        **parts,
    )
    return [LaneScheduler(name, shared) for name in names]


def row_for(
    lane: LaneScheduler,
    prompts: PromptRenderer,
    prompt: PreparedPrompt,
    draft_tokens: int,
    max_tokens: int,
    *,
    asked: Prompt | None = None,
    sampling: Sampling = GREEDY,
    stop: tuple[str, ...] = (),
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> Row:
    """Return a row for a lane; `options` are further fields of its generation."""
    generation = Generation(
        request_id="row",
        lane=lane.name,
        prompt=asked or Prompt(),
        sampling=sampling,
        **(options or {}),
    )
    given = {"seed": 0, "ends": lane.ends, "draft_tokens_fixed": True, **fields}
    return Row(
        generation=generation,
        prompt=prompt,
        max_tokens=max_tokens,
        draft_tokens=draft_tokens,
        text=TextStream(prompts.decode, stop),
        speculation=SpeculationCounter(draft_tokens),
        **given,
    )


def run_until_idle(*lanes: LaneScheduler) -> None:
    while any(lane.busy for lane in lanes):
        for lane in lanes:
            lane.step()
