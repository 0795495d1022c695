"""Rows for lanes of the engine in this process, without HTTP: greedy, with a fixed draft length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from paceline.request.profile import Sampling
from workers.engine.decode.row import Row, SpeculationCounter
from workers.engine.lane.admission import Admission
from workers.engine.lane.memory import MemoryEstimate, measure_memory
from workers.engine.lane.scheduler import EngineParts, LaneScheduler
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.prefix.cache import PrefixCache
from workers.engine.text.detokenizer import TextStream
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import Generation, LaneName, LaneSettings, Prompt, SpecPrefillOptions

_IN_FULL: Final = SpecPrefillOptions()
_GREEDY: Final = Sampling(temperature=0)


def lane_of(
    checkpoint: Checkpoint, prompts: PromptRenderer, draft_tokens: int, **options: Any
) -> LaneScheduler:
    """Return a lane for text; `lanes_of` has the options."""
    (lane,) = lanes_of(checkpoint, prompts, draft_tokens, names=(LaneName.TEXT_MTP,), **options)
    return lane


def lanes_of(
    checkpoint: Checkpoint,
    prompts: PromptRenderer,
    draft_tokens: int,
    *,
    names: Sequence[LaneName] = tuple(LaneName),
    kind: type[LaneScheduler] = LaneScheduler,
    max_rows: int = 8,
    cache_bytes: int = 0,
    chunk_tokens: int = 1024,
    budget_s: float = 0.1,
    memory: MemoryEstimate | None = None,
    **more: Any,
) -> list[LaneScheduler]:
    """Return the lanes of one engine, whose prefix cache keeps nothing unless it has a size."""
    settings = LaneSettings(
        draft_tokens=draft_tokens,
        max_rows=max_rows,
        prefill_chunk_tokens=chunk_tokens,
        prefill_budget_s=budget_s,
    )
    memory = memory or measure_memory(checkpoint.target, checkpoint.head)
    admission = Admission(checkpoint.target, memory, PrefixCache(cache_bytes))
    parts = EngineParts(
        settings=settings, checkpoint=checkpoint, prompts=prompts, admission=admission, **more
    )
    return [kind(name, parts) for name in names]


def greedy_row(
    prompts: PromptRenderer,
    prompt: PreparedPrompt,
    draft_tokens: int,
    max_tokens: int,
    *,
    sink: Callable[[Any], None] = lambda _: None,
    ends: frozenset[int] = frozenset(),
    fixed: bool = True,
    lane: LaneName = LaneName.TEXT_MTP,
    sampling: Sampling = _GREEDY,
    spec_prefill: SpecPrefillOptions = _IN_FULL,
    **more: Any,
) -> Row:
    """Return a row, greedy by default; without `ends` it goes on to its limit."""
    return Row(
        generation=Generation(
            request_id="bench",
            lane=lane,
            prompt=Prompt(),
            sampling=sampling,
            spec_prefill=spec_prefill,
        ),
        prompt=prompt,
        seed=0,
        max_tokens=max_tokens,
        ends=ends,
        draft_tokens=draft_tokens,
        draft_tokens_fixed=fixed,
        text=TextStream(prompts.decode),
        speculation=SpeculationCounter(draft_tokens),
        sink=sink,
        **more,
    )
