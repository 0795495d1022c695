"""The engine as the rest of the worker sees it: start, generate, report, stop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator

import mlx.core as mx

from workers.engine.assembly import Assembly, assemble
from workers.engine.row import Row, Sink
from workers.engine.scheduler import Lane
from workers.engine.settings import EngineSettings
from workers.engine.tally import SpeculationTally
from workers.engine.thread import EngineThread
from workers.engine.tokenizer import PreparedPrompt
from workers.engine.types import (
    EngineBusy,
    EngineError,
    Event,
    Finished,
    Generation,
    InvalidGeneration,
    ModelUnusable,
)
from workers.protocol import LaneReport


class Engine:
    """One model, its lanes, and the thread they run on. Make it with `Engine.start`."""

    def __init__(
        self, settings: EngineSettings, thread: EngineThread[Assembly], assembly: Assembly
    ) -> None:
        self.prompts = assembly.prompts
        self.card = assembly.card
        self._settings = settings
        self._thread = thread
        self._vocabulary = assembly.checkpoint.vocabulary
        self._default_max_tokens = assembly.checkpoint.default_max_tokens
        self._memory = assembly.memory
        self._snapshots = assembly.snapshots
        self._lanes = {lane.name: lane for lane in assembly.lanes}

    @classmethod
    def start(cls, settings: EngineSettings) -> Engine:
        """Load the model on a thread of its own and serve it; raise `ModelUnusable` if it cannot.

        Blocks until the weights are in memory and the MTP head has been tested.
        """

        def load() -> tuple[Assembly, tuple[Lane, ...]]:
            assembly = assemble(settings)
            return assembly, assembly.lanes

        thread = EngineThread(load)
        try:
            assembly = thread.start()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelUnusable(
                f"The model in {settings.model} cannot be loaded: {error}"
            ) from error
        return cls(settings, thread, assembly)

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

    def memory_limit_bytes(self) -> int:
        """Return the bytes that it may hold at most."""
        return self._memory.limit_bytes

    def snapshot_bytes(self) -> int:
        """Return the bytes of them that are kept of system prompts."""
        return self._snapshots.size_bytes

    def prefixes(self) -> tuple[str, ...]:
        """Name the system prompts that are kept, the last one used first."""
        return self._snapshots.keys

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; generations still running end in `EngineStopped`."""
        self._thread.stop(timeout_s)
        self._snapshots.close()

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
        if prompt.prefix is not None:
            row.read_ahead = await asyncio.to_thread(self._snapshots.read_ahead, prompt.prefix.key)
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
        longest = self._memory.longest_row()
        room = min(self.card.context_tokens, longest) - len(prompt.tokens)
        if not prompt.tokens:
            raise InvalidGeneration("messages", "The prompt is empty.")
        if len(prompt.tokens) >= self.card.context_tokens:
            raise InvalidGeneration(
                "messages",
                f"The prompt has {len(prompt.tokens)} tokens; "
                f"this model's context holds {self.card.context_tokens}.",
                code="context_length_exceeded",
            )
        if room < 1:
            raise InvalidGeneration(
                "messages",
                f"The prompt has {len(prompt.tokens)} tokens; "
                f"this machine's memory holds {longest}.",
                code="prompt_exceeds_memory",
            )
        for token, _ in generation.sampling.logit_bias:
            if token >= self._vocabulary:
                raise InvalidGeneration("logit_bias", f"Token {token} is not in the vocabulary.")
        lane = self._lanes[generation.lane]
        bypass = lane.bypasses(generation)
        asked = generation.draft_tokens
        draft_tokens = self._settings.draft_tokens if asked is None else asked
        if bypass or not lane.speculates:
            draft_tokens = 0
        seed = generation.sampling.seed
        return Row(
            generation=generation,
            prompt=prompt,
            seed=secrets.randbits(63) if seed is None else seed,
            max_tokens=min(generation.max_tokens or self._default_max_tokens or room, room),
            draft_tokens=draft_tokens,
            draft_tokens_asked=asked is not None,
            bypass=bypass,
            text=self.prompts.stream(generation),
            tally=SpeculationTally(draft_tokens),
            sink=hear,
        )
