"""What goes into the engine and what comes out: frozen records, no MLX type in them.

What an engine is started with, and what it says of itself: records without MLX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from policies.request.profile import Bypass, Sampling
from workers.engine.spec_prefill import SpecPrefillOptions, SpecPrefillSettings
from workers.protocol import Speculation


class LaneName(StrEnum):
    """The two lanes of a worker; they share one copy of the weights."""

    TEXT_MTP = "text-mtp"
    VLM = "vlm"


class FinishReason(StrEnum):
    """Why a generation ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One decoded picture: RGB bytes, row by row from the top."""

    width_px: int
    height_px: int
    rgb: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered prompt; `text` holds one image marker of the model's own for each picture."""

    text: str
    pictures: tuple[Picture, ...] = ()
    prefix_text: str = ""
    """The beginning that prompts with the same system messages and tools share."""
    prefix_key: str | None = None
    """The gateway's key for it; None lets the worker make one of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One answer to be generated (a request with n = 3 becomes three of them)."""

    request_id: str
    lane: LaneName
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None = None
    """None means the checkpoint's own limit, or else up to the end of the context window."""
    stop: tuple[str, ...] = ()
    keep_call_tokens: bool = False
    """Whether the control tokens that calls of tools are written with stay in its text."""
    top_logprobs: int | None = None
    draft_tokens: int | None = None
    """k wanted by this request; None takes the worker's setting."""
    spec_prefill: SpecPrefillOptions = field(default_factory=SpecPrefillOptions)
    """Whether a long prompt may be read sparsely, and how much of it."""
    further_choice: bool = False
    """Another answer to a prompt that is counted already."""
    bypass: tuple[Bypass, ...] = ()
    """Why it does not speculate, counted in the lane's `bypass_counts`; empty if it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token that was, or might have been, chosen."""

    token_id: int
    raw: bytes
    """Of a character that takes several tokens each has only some."""
    logprob: float

    @property
    def text(self) -> str:
        r"""Spell it, with escapes such as `\xf0` for the bytes that are no whole character."""
        return self.raw.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob(ScoredToken):
    """The log-probability of one emitted token and of the likeliest alternatives."""

    top: tuple[ScoredToken, ...] = ()
    """Likeliest first."""
    offset_chars: int = 0
    """Where in the answer its text begins, or that of the character which it goes on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Exact token counts of one generation."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    skipped_tokens: int = 0
    """Of the prompt, never read: SpecPrefill left them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Newly decided text; empty while a stop string or a split character may still follow."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class DraftStep(NamedTuple):
    """One verify of one request's draft; the token that it brings anyway is not counted."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of one generation; nothing follows."""

    reason: FinishReason
    usage: Usage
    speculation: Speculation = field(default_factory=Speculation)
    steps: tuple[DraftStep, ...] = ()
    """What the counts are sums of, but for drafts that failed: those were no step."""


Event = Delta | Finished
"""Zero or more `Delta`, then one `Finished`; a failure is raised out of the iterator instead."""


class EngineError(Exception):
    """The engine cannot run or finish a generation.

    EngineError
    +-- InvalidGeneration   this request can never run here (names the field)
    +-- EngineBusy          the queue is full; try again later
    +-- GenerationFailed    it broke while running; others go on
    +-- EngineStopped       the engine is shutting down or its thread has died
    +-- ModelUnusable       the model folder cannot be served
    """


class InvalidGeneration(EngineError):
    """The request can never run on this engine; `param` names the field of the body."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.code = code


class EngineBusy(EngineError):
    """The waiting line is full; `retry_after_s` says when a try may pay."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("The waiting line of this lane is full.")
        self.retry_after_s = retry_after_s


class GenerationFailed(EngineError):
    """One generation broke; the lane goes on with the others."""


class EngineStopped(EngineError):
    """The engine takes no more work."""


class ModelUnusable(EngineError):
    """The model folder cannot be served; the message says what to look at."""


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
    prefill_chunk_tokens: int = 1024
    """Read at a time while nobody decodes."""
    prefill_budget_s: float = 0.1
    """Time of a chunk while somebody does."""
    prefix_cache_bytes: int = 1 << 30
    """Memory for what is kept of system prompts, and disk for it where there is a folder."""
    prefix_cache_dir: Path | None = None
    """Where they are kept across restarts; None keeps them in memory only."""
    spec_prefill: SpecPrefillSettings | None = None
    """None reads every prompt in full."""
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
    native_verify: bool
    """Whether a draft is verified in one forward pass; else token by token, which never pays."""
    mtp: bool
    mtp_unavailable_reason: str | None
    draft_tokens_requested: int
    draft_tokens_effective: int
    spec_prefill: str | None = None
    """How long prompts are read, for people; None where no draft model was asked for."""
