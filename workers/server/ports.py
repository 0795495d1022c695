"""What the HTTP face needs of an engine, so that it can be read and tested without MLX."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from workers.engine.types import Event, Generation, ModelCard
from workers.protocol import LaneReport

Json = Any
"""A value as JSON has it; typed loosely at this one border."""


class Prompts(Protocol):
    """The chat template of the model; thread-safe and free of MLX."""

    @property
    def tool_parser_name(self) -> str | None:
        """mlx-vlm's name of the format in which this model calls tools."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        template_kwargs: Mapping[str, Json] | None = None,
    ) -> str:
        """Render messages into a prompt; raise `InvalidGeneration` where the template refuses."""

    def shared_prefix(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        template_kwargs: Mapping[str, Json] | None = None,
    ) -> str:
        """Return what every prompt with these system messages and tools begins with."""


class ServingEngine(Protocol):
    """A running engine."""

    @property
    def card(self) -> ModelCard:
        """What is known of the loaded model."""

    @property
    def prompts(self) -> Prompts:
        """The chat template of the model."""

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""

    def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Run one generation; closing the iterator removes its row."""

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """One consistent snapshot of all lanes; any thread."""

    def memory_bytes(self) -> int:
        """Memory in use by MLX."""

    def memory_limit_bytes(self) -> int:
        """Memory that it may use at most; 0 where that is not known."""

    def prefix_cache_bytes(self) -> int:
        """Memory of it that holds system prompts."""

    def prefixes(self) -> tuple[str, ...]:
        """Name the system prompts that are kept, the last one used first."""

    def stop(self) -> None:
        """End the engine thread; what still runs is refused."""
