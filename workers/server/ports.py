"""Interface of an engine to the HTTP server, which can be tested with it but without MLX."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from paceline.drain_rate import QueuePlace
from paceline.protocol import LaneReport
from workers.engine.decode.memory_pressure import MemoryReading
from workers.engine.prefix.transfer import PrefixOffer, PrefixQuery, PrefixSource
from workers.engine.types import Card, EngineState, Event, Generation, ModelCard

if TYPE_CHECKING:  # it imports Transformers
    from workers.engine.text.tokenizer import PromptRenderer

Json = Any
"""A JSON value; typed loosely at this boundary alone."""


class RunningEngine(Protocol):
    """A running engine of any kind: its model, its state and its counts."""

    @property
    def card(self) -> Card:
        """Description of the loaded model."""

    @property
    def alive(self) -> bool:
        """Whether the engine serves, or will serve again."""

    @property
    def ready(self) -> bool:
        """Whether it serves now; the ranks of a group may be starting again."""

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """Return one consistent snapshot of all lanes; thread-safe."""

    def memory_reading(self) -> MemoryReading:
        """Return what the process takes of the memory of this machine."""

    def state(self) -> EngineState:
        """Return the memory in use by MLX, and the keys of the prefix cache."""

    async def drop_prefixes(self, scope: str | None) -> None:
        """Delete all of an isolation scope from memory and disk; None: of all scopes."""

    def stop(self) -> None:
        """Stop the engine thread; running generations raise `EngineStopped`."""


class ServingEngine(RunningEngine, Protocol):
    """A running engine that generates."""

    @property
    def card(self) -> ModelCard:
        """Description of the loaded model."""

    @property
    def prompts(self) -> PromptRenderer:
        """The chat template of the model."""

    def generate(
        self, generation: Generation, prefix_sources: Sequence[PrefixSource] = ()
    ) -> AsyncGenerator[Event, None]:
        """Run one generation; closing the iterator removes its row.

        `prefix_sources` are workers that may have read what the prompt begins with, the best first.
        """

    def open(self, query: PrefixQuery) -> AbstractAsyncContextManager[PrefixOffer]:
        """Offer nodes of the prefix cache to another engine; raise `TransferFailed` without any."""

    async def check(self, generation: Generation) -> int:
        """Return the tokens of the prompt; raise the `EngineError` that `generate` would raise."""

    def queue_place(self, generation: Generation) -> QueuePlace | None:
        """Return the place of a generation in the queue; None if it waits no more."""
