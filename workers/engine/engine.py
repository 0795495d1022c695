"""The engine as the rest of the worker sees it: start, generate, report, stop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from workers.adapters.report import LaneReport
from workers.engine.counters import LaneCounters, SpeculationTally
from workers.engine.detokenize import TextStream
from workers.engine.lane import Lane
from workers.engine.loop import EngineThread
from workers.engine.prompts import PreparedPrompt, PromptRenderer
from workers.engine.requests import (
    EngineBusy,
    EngineError,
    EngineStopped,
    Event,
    Finished,
    Generation,
    InvalidGeneration,
    LaneName,
    ModelUnusable,
)
from workers.engine.rows import Row, Sink
from workers.engine.seam import Checkpoint, load_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is started with."""

    model: Path
    """A local Hugging Face folder."""
    served_name: str
    lanes: tuple[LaneName, ...] = (LaneName.TEXT_MTP, LaneName.VLM)
    draft_tokens: int = 2
    max_rows: int = 8
    """Rows that decode side by side, a lane."""
    prefill_chunk_tokens: int = 512
    queue_limit: int = 256
    """Requests that may wait for a row, a lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a started engine serves."""

    model: str
    family: str
    lanes: tuple[LaneName, ...]
    context_tokens: int
    vision: bool
    parameters: int
    """Of the model and its MTP head together."""
    weights_bytes: int
    """What they take in memory, once for all lanes."""
    mtp: bool
    why_no_mtp: str | None
    draft_tokens_requested: int
    draft_tokens_effective: int


class Engine:
    """One model, its lanes, and the thread they run on. Make it with `Engine.start`."""

    def __init__(
        self,
        settings: EngineSettings,
        thread: EngineThread[Checkpoint],
        checkpoint: Checkpoint,
        lanes: tuple[Lane, ...],
        prompts: PromptRenderer,
    ) -> None:
        self.prompts = prompts
        self.card = _card(settings, checkpoint, lanes, prompts)
        self._settings = settings
        self._thread = thread
        self._vocabulary = checkpoint.vocabulary
        self._lanes = {lane.name: lane for lane in lanes}

    @classmethod
    def start(cls, settings: EngineSettings) -> Engine:
        """Load the model on a thread of its own and serve it; raise `ModelUnusable` if it cannot.

        Blocks until the weights are in memory.
        """
        made: list[Lane] = []
        renderers: list[PromptRenderer] = []

        def load() -> tuple[Checkpoint, list[Lane]]:
            checkpoint = load_checkpoint(settings.model)
            renderers.append(PromptRenderer(checkpoint.processor))
            made.extend(_make_lanes(settings, checkpoint, renderers[0]))
            return checkpoint, made

        thread = EngineThread(load)
        try:
            checkpoint = thread.start()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelUnusable(
                f"The model in {settings.model} cannot be loaded: {error}"
            ) from error
        return cls(settings, thread, checkpoint, tuple(made), renderers[0])

    @property
    def alive(self) -> bool:
        """Say whether the engine takes work."""
        return self._thread.alive

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """Return a snapshot of every lane; safe from any thread."""
        return tuple(lane.counters.report() for lane in self._lanes.values())

    def memory_bytes(self) -> int:
        """Return the bytes that MLX holds: weights, caches, activations."""
        return int(mx.get_active_memory())

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; generations still running end in `EngineStopped`."""
        self._thread.stop(timeout_s)

    async def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation; raise an `EngineError` if it cannot go on.

        Closing the generator, or cancelling the task that reads it, drops the row within one step.
        """
        lane = self._lanes.get(generation.lane)
        if lane is None:
            raise InvalidGeneration("model", f"This worker has no {generation.lane} lane.")
        if lane.waiting >= self._settings.queue_limit:
            raise EngineBusy(retry_after_s=1.0)
        prompt = await asyncio.to_thread(self.prompts.prepare, generation.prompt)
        events: asyncio.Queue[Event | EngineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(event: Event | EngineError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        row = self._row(generation, prompt, hear)
        if not self.alive:
            raise EngineStopped("The engine has stopped.")
        self._thread.submit(generation.lane, row)
        try:
            while True:
                event = await events.get()
                if isinstance(event, EngineError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            if not row.finish:
                self._thread.cancel(row)

    def _row(self, generation: Generation, prompt: PreparedPrompt, hear: Sink) -> Row:
        room = self.card.context_tokens - len(prompt.tokens)
        if not prompt.tokens:
            raise InvalidGeneration("messages", "The prompt is empty.")
        if room < 1:
            raise InvalidGeneration(
                "messages",
                f"The prompt has {len(prompt.tokens)} tokens; "
                f"this model's context holds {self.card.context_tokens}.",
                code="context_length_exceeded",
            )
        for token, _ in generation.sampling.logit_bias:
            if token >= self._vocabulary:
                raise InvalidGeneration("logit_bias", f"Token {token} is not in the vocabulary.")
        draft_tokens = self._draft_tokens(generation)
        seed = generation.sampling.seed
        return Row(
            generation=generation,
            prompt=prompt,
            seed=secrets.randbits(63) if seed is None else seed,
            max_tokens=min(generation.max_tokens or room, room),
            draft_tokens=draft_tokens,
            text=TextStream(self.prompts.decode, generation.stop),
            tally=SpeculationTally(draft_tokens),
            sink=hear,
        )

    def _draft_tokens(self, generation: Generation) -> int:
        lane = self._lanes[generation.lane].counters.report()
        if generation.bypass or not lane.mtp_enabled:
            return 0
        asked = generation.draft_tokens
        return lane.effective_draft_tokens if asked is None else asked


def _make_lanes(
    settings: EngineSettings, checkpoint: Checkpoint, prompts: PromptRenderer
) -> list[Lane]:
    lanes = []
    for name in settings.lanes:
        speculates = name is LaneName.TEXT_MTP and checkpoint.head is not None
        if name is LaneName.TEXT_MTP and not speculates:
            continue  # a lane that promises speculation and has none would mislead the router
        draft_tokens = settings.draft_tokens if speculates else 0
        counters = LaneCounters(
            name,
            slots=settings.max_rows,
            requested_draft_tokens=draft_tokens,
            draft_tokens=draft_tokens,
        )
        lanes.append(
            Lane(
                name,
                checkpoint,
                prompts,
                counters,
                speculates=speculates,
                max_rows=settings.max_rows,
                chunk_tokens=settings.prefill_chunk_tokens,
            )
        )
    if not lanes:
        raise ModelUnusable(f"None of the lanes asked for can run: {checkpoint.why_no_mtp}.")
    return lanes


def _card(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    lanes: tuple[Lane, ...],
    prompts: PromptRenderer,
) -> ModelCard:
    parts = [checkpoint.target.model.parameters()]
    if checkpoint.head is not None:
        parts.append(checkpoint.head.parameters())
    parameters = [array for _, array in tree_flatten(parts)]
    effective = max((lane.counters.report().effective_draft_tokens for lane in lanes), default=0)
    return ModelCard(
        model=settings.served_name,
        family=checkpoint.family,
        lanes=tuple(lane.name for lane in lanes),
        context_tokens=checkpoint.context_tokens,
        vision=prompts.sees_pictures,
        parameters=sum(array.size for array in parameters),
        weights_bytes=sum(array.nbytes for array in parameters),
        mtp=checkpoint.head is not None,
        why_no_mtp=checkpoint.why_no_mtp,
        draft_tokens_requested=settings.draft_tokens,
        draft_tokens_effective=effective,
    )
