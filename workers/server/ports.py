"""What the HTTP face needs of an engine, so that it can be read and tested without MLX."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from workers.adapters.report import LaneReport
from workers.engine.requests import Event, Generation, LaneName

Json = Any
"""A value as JSON has it; typed loosely at this one border."""


class Card(Protocol):
    """What is known of the loaded model."""

    @property
    def model(self) -> str:
        """The name it is served under."""

    @property
    def lanes(self) -> tuple[LaneName, ...]:
        """The lanes that run."""

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and answer together."""

    @property
    def vision(self) -> bool:
        """Whether it sees pictures."""

    @property
    def weights_bytes(self) -> int:
        """Size of the one copy of the weights."""

    @property
    def parameters(self) -> int:
        """How many numbers the weights hold."""

    @property
    def mtp(self) -> bool:
        """Whether the text lane speculates."""

    @property
    def draft_tokens_requested(self) -> int:
        """The k that was asked for at the start."""

    @property
    def draft_tokens_effective(self) -> int:
        """The k that the model allows."""

    @property
    def why_no_mtp(self) -> str | None:
        """A sentence, where it does not speculate."""


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


class ServingEngine(Protocol):
    """A running engine."""

    @property
    def card(self) -> Card:
        """What is known of the loaded model."""

    @property
    def prompts(self) -> Prompts:
        """The chat template of the model."""

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""

    def generate(self, generation: Generation) -> AsyncIterator[Event]:
        """Run one generation; closing the iterator removes its row."""

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """One consistent snapshot of all lanes; any thread."""

    def memory_bytes(self) -> int:
        """Memory in use by MLX."""

    def stop(self) -> None:
        """End the engine thread; what still runs is refused."""
