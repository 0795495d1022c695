"""Interface of an engine to the HTTP server, which can be tested with it but without MLX."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from paceline.drain_rate import QueuePlace
from paceline.protocol import LaneReport
from paceline.request.pooling import EmbeddingsRequest, RerankRequest
from workers.engine.decode.memory_pressure import MemoryReading
from workers.engine.prefix.transfer import PrefixOffer, PrefixQuery, PrefixSource
from workers.engine.text.tool_formats import ToolFormat
from workers.engine.types import (
    Card,
    EngineState,
    Event,
    Generation,
    ModelCard,
    Pooled,
    PoolingCard,
    Prompt,
)

Json = Any
"""A JSON value; typed loosely at this boundary alone."""


class Prompts(Protocol):
    """The chat template of the model; thread-safe and free of MLX."""

    @property
    def tool_format(self) -> ToolFormat | None:
        """The model's format of tool calls; None without one."""

    def template_variables(self, given: Mapping[str, Json], effort: str | None) -> dict[str, Json]:
        """Return the variables by which the template knows a reasoning effort, and those given."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        template_kwargs: Mapping[str, Json] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render messages into a prompt; raise `InvalidGeneration` if the template rejects them."""

    def tokenize_completion(self, text: str, limit: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a text to complete, or the last `limit` and some before them.

        Raise `InvalidGeneration` without a limit for a text that is far beyond the context.
        """

    def count(self, prompt: Prompt) -> int:
        """Return the number of tokens of a prompt, pictures included."""

    def spell(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, control tokens too."""

    def shared_prefix(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        template_kwargs: Mapping[str, Json] | None = None,
    ) -> str:
        """Return the common beginning of all prompts with these system messages and tools."""

    def turn_end(
        self,
        text: str,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        template_kwargs: Mapping[str, Json] | None = None,
    ) -> int:
        """Return the length of the rendered `text` up to the end of the last message."""

    def continues(self, template_kwargs: Mapping[str, Json] | None = None) -> bool:
        """Return whether the next prompt of a chat begins with this one and its answer."""


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
    def prompts(self) -> Prompts:
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


class PoolingEngine(RunningEngine, Protocol):
    """A running embedder or reranker."""

    @property
    def card(self) -> PoolingCard:
        """Description of the loaded model."""

    async def compute(
        self, request: EmbeddingsRequest | RerankRequest, token_limit: int | None = None
    ) -> Pooled:
        """Return a vector for each text, or a score for each document.

        A cancelled call drops its rows.
        """

    async def check(self, request: EmbeddingsRequest | RerankRequest) -> int:
        """Return the tokens of a request; raise the `EngineError` that its answer would be."""
