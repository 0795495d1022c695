"""Requests, events, errors and settings of the engine: frozen records without MLX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.protocol import ANSWER_FIELD, DraftSource, SamplingDefaults, Speculation, StartStage
from paceline.request.constraint import Constraint
from paceline.request.profile import Bypass, Sampling

if TYPE_CHECKING:  # a worker with wrong settings says so before it is imported
    import numpy as np
    from numpy.typing import NDArray


class LaneName(StrEnum):
    """The two lanes of a worker; they share one copy of the weights."""

    TEXT_MTP = "text-mtp"
    VLM = "vlm"


class WeightType(StrEnum):
    """Types of weights in memory; a CPU always computes in float32."""

    AUTO = "auto"
    """float16 on Apple's M1 and M2, which compute no bfloat16, unless the family exceeds its range;
    else as they are stored."""
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class FinishReason(StrEnum):
    """OpenAI's reasons why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False)
class Picture:
    """One decoded picture: RGB bytes, row by row from the top."""

    width_px: int
    height_px: int
    rgb: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered prompt; `text` has one image marker of the model for each picture."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    """The prompt as tokens, in place of a text."""
    pictures: tuple[Picture, ...] = ()
    prefix_text: str = ""
    """Beginning that all prompts with the same system messages and tools share."""
    prefix_key: str | None = None
    """The gateway's key of the shared prefix; None lets the worker compute one."""
    turn_key: str = ""
    """The gateway's key of the prompt up to the end of its last message."""
    turn_end: int = 0
    """Length of `text` up to the end of the last message; 0 if unknown."""
    continues: bool = False
    """Whether the next prompt of the chat begins with this one and its answer."""
    scope: str | None = ""
    """Prompts of the same isolation scope share the prefix cache; None: it stores nothing."""


class TokenStep(NamedTuple):
    """Tokens that one step of the engine has added to an answer."""

    tokens: tuple[int, ...]
    """None if the draft of the step failed."""
    sources: tuple[DraftSource, ...] = ()
    """Of the draft tokens that the step has verified, or lost."""
    accepted: int = 0
    """The first tokens of the step that were drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """The beginning of an answer that the client has received from another worker."""

    steps: tuple[TokenStep, ...] = ()
    finished: bool = False
    """Whether the client knows the finish reason too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPrefillOptions:
    """Options of a request; None leaves the decision to the worker."""

    sparse: bool | None = None
    keep_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Request for one answer (a chat request with n = 3 becomes three of them)."""

    request_id: str
    lane: LaneName
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None = None
    """None applies the checkpoint's limit, or else that of the context window."""
    choices: int = 1
    """Answers to the prompt, this one included."""
    token_limit: int | None = None
    """The most tokens of all prompts and answers of the request together; None: no limit."""
    further_tokens: int = 0
    """The most tokens of its other prompts and of their answers."""
    min_tokens: int = 0
    """Tokens before which no token may end the answer; a form that is complete ends it."""
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Whether the model's own end tokens are tokens as any other."""
    prompt_limit: int | None = None
    """Leave out the beginning of a longer prompt; -1: of a prompt that exceeds the context."""
    split_reasoning: bool = False
    """Whether the model's reasoning is apart from the text, if it marks any."""
    thinking_budget: int | None = None
    """The most tokens of reasoning, if it is apart; None: no separate limit."""
    constraint: Constraint | None = None
    """The form that the answer must have."""
    call_marks: tuple[str, str] | None = None
    """Begin and end of the calls that the answer may have instead of its form."""
    keep_call_tokens: bool = False
    """Whether the text includes the control tokens that mark tool calls."""
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    """Whether `PromptScored` comes before the answer."""
    token_sources: bool = False
    """Whether the deltas contain the tokens and their sources."""
    draft_tokens: int | None = None
    """Draft length that the request names; None applies the worker's setting."""
    exact: bool = False
    """Whether the answer must be the same in every bit, with and without other rows: it drafts
    nothing, shares no pass and no prefix, and its prompt is read in chunks of one size."""
    report_steps: bool = False
    """Whether the deltas contain the steps of the engine."""
    given: GivenAnswer | None = None
    """The part of the answer that the client already has; None for a new answer."""
    spec_prefill: SpecPrefillOptions = field(default_factory=SpecPrefillOptions)
    """Whether to read a long prompt sparsely, and how much of it."""
    further_choice: bool = False
    """Whether another choice of the same request already counts the prompt."""
    bypass: tuple[Bypass, ...] = ()
    """Reasons not to speculate, counted in the lane's `bypass_counts`; empty if there are none."""

    def check_tokens(self, vocabulary: int) -> None:
        """Raise `InvalidGeneration` for a token outside the prompt that no model has."""
        given = self.given.steps if self.given else ()
        named = {
            "logit_bias": [token for token, _ in self.sampling.logit_bias],
            "stop_token_ids": self.stop_tokens,
            ANSWER_FIELD: [token for step in given for token in step.tokens],
        }
        for name, tokens in named.items():
            unknown = next((token for token in tokens if token >= vocabulary), None)
            if unknown is not None:
                raise InvalidGeneration(name, f"Token {unknown} is not in the vocabulary.")

    def answer_limit(self, prompt_tokens: int, room: int, default: int | None) -> int:
        """Return the most tokens of the answer; `room` fit, and `default` is the model's limit.

        Raise `TokenLimitExceeded` if the request may then need more than it is allowed.
        """
        wanted = (default or room) if self.max_tokens is None else self.max_tokens
        limit = min(wanted, room)
        tokens = prompt_tokens + self.choices * limit + self.further_tokens
        if self.token_limit is not None and tokens > self.token_limit:
            raise TokenLimitExceeded(tokens)
        return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A candidate token with its log-probability."""

    token_id: int
    raw: bytes
    """Bytes of the token: a part of a character where a character takes several tokens."""
    logprob: float
    """NaN for the first token of a prompt, which nothing predicts."""

    @property
    def text(self) -> str:
        r"""Return the text, with escapes such as `\xf0` for an incomplete character."""
        return self.raw.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob(ScoredToken):
    """An emitted token with its most likely alternatives."""

    top: tuple[ScoredToken, ...] = ()
    """Most likely first."""
    offset_chars: int = 0
    """Offset in the answer of its text, or of the character that it continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Exact token counts of one generation."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    written_tokens: int = 0
    """Other prompt tokens that the prefix cache has stored for later prompts."""
    system_tokens: int = 0
    """Prompt tokens of the beginning that prompts share: tools and system prompt."""
    skipped_tokens: int = 0
    """Prompt tokens that SpecPrefill skipped."""
    reasoning_tokens: int = 0
    """Tokens of the completion that are reasoning, without the marks around it."""


class SourcedToken(NamedTuple):
    """A token of an answer, with the text that it completed."""

    text: str
    """Empty if the token ends the answer, only begins a character, or is part of a stop string."""
    source: DraftSource | None
    """Who drafted the token, which the target accepted; None if the target itself chose it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text; empty while it may belong to a stop string or to an incomplete character."""

    text: str
    reasoning: str = ""
    """New reasoning; it comes before the new text."""
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: tuple[SourcedToken, ...] = ()
    """Tokens whose text is complete, if the generation asks for `token_sources`."""
    usage: Usage = Usage(prompt_tokens=0, completion_tokens=0)
    """The counts of the generation so far."""
    steps: tuple[TokenStep, ...] = ()
    """Steps since the last delta, if the generation asks for `report_steps`."""
    partial: bool = False
    """Whether it ends within a step, which the next delta reports."""
    given: bool = False
    """Whether the client has it already."""


class DraftStep(NamedTuple):
    """Counts of one verified draft, without the token that every verify adds."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Last event of a generation."""

    reason: FinishReason
    usage: Usage
    speculation: Speculation = field(default_factory=Speculation)
    steps: tuple[DraftStep, ...] = ()
    """Steps that `speculation` sums up; drafts that failed are no steps."""
    timed_tokens: int = 0
    """Tokens that followed the first of this worker, in `generation_s`."""
    generation_s: float = 0.0
    stop: str | int | None = None
    """The stop string or token of the request that ended the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """The lane has taken the row, and has read a part of its prompt."""

    read_tokens: int
    prompt_tokens: int
    """Without the tokens that SpecPrefill skips, once it has chosen them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """The log-probability of each token of the prompt, given those before it."""

    logprobs: tuple[TokenLogprob, ...]


Event = PrefillProgress | PromptScored | Delta | Finished
"""A generation yields `PrefillProgress` while it reads a long prompt, `PromptScored` if it asks for
that, any number of `Delta`, then one `Finished`, or raises `EngineError`."""


ProgressSink = Callable[[StartStage, int, int], None]
"""Called from any thread with the stage of a start, its progress, and its total."""


class EngineError(Exception):
    """The engine cannot run or finish a generation.

    EngineError
    +-- InvalidGeneration   the request can never run on this engine (names the field)
    +-- TokenLimitExceeded  the request may need more tokens than it is allowed
    +-- EngineBusy          the queue is full; a retry may succeed
    +-- MemoryShort         the memory of the machine is nearly full; a retry may succeed
    +-- GenerationFailed    the generation failed while running; others continue
    +-- EngineStopped       the engine is shutting down or its thread has died
    +-- ModelUnusable       the engine cannot serve the model
    """


class InvalidGeneration(EngineError):
    """The request can never run on this engine; `param` names the field of the body."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.code = code


class TokenLimitExceeded(EngineError):
    """The request may need more `tokens` than its `token_limit`."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"The request may need {tokens} tokens.")
        self.tokens = tokens


class EngineBusy(EngineError):
    """The queue is full; `retry_after_s` is the suggested delay of a retry."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("The queue of this lane is full.")
        self.retry_after_s = retry_after_s


class MemoryShort(EngineError):
    """The memory of the machine is nearly full: `used_bytes` of `limit_bytes`, or the kernel's."""

    def __init__(self, used_bytes: int, limit_bytes: int) -> None:
        super().__init__("The memory of this machine is nearly full.")
        self.used_bytes = used_bytes
        self.limit_bytes = limit_bytes


class GenerationFailed(EngineError):
    """One generation failed; the lane continues with the others."""


class EngineStopped(EngineError):
    """The engine accepts no more requests."""


class ModelUnusable(EngineError):
    """The engine cannot serve the model; the message names the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPrefillSettings:
    """Settings of a worker's sparse prefill."""

    draft: Path
    """Directory of a small model with the target's vocabulary."""
    threshold_tokens: int = 8192
    """Uncached tokens from which a prompt is read sparsely, unless the request decides."""
    keep_share: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """Settings of the lanes of an engine."""

    draft_tokens: int = 2
    max_rows: int = 8
    """Maximum number of rows that decode together in one lane."""
    prefill_chunk_tokens: int = 1024
    """Chunk of a prefill while no row decodes."""
    prefill_budget_s: float = 0.1
    """Maximum duration of a chunk while rows decode."""
    queue_limit: int = 256
    """Maximum number of queued requests in one lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(LaneSettings):
    """Settings of an engine."""

    model: Path
    """A local directory in the format of Hugging Face."""
    served_name: str
    adapter: Path | None = None
    """A local directory with a LoRA adapter; None: only the model."""
    dtype: WeightType | None = None
    """Type of the weights that are not quantised; None: as they are stored."""
    context_tokens: int | None = None
    """Limit of prompt and answer together; None: the context that the model was trained for."""
    lanes: tuple[LaneName, ...] = (LaneName.TEXT_MTP, LaneName.VLM)
    prefix_cache_bytes: int | None = None
    """Limit of the prefix cache in memory; None: a quarter of that for rows."""
    prefix_cache_quantized: bool = False
    """Whether the prefix cache keeps keys and values in 8 bits."""
    prefix_cache_disk_bytes: int = 20 * 10**9
    """Limit of the prefix cache on disk; 0 stores nothing there."""
    prefix_cache_dir: Path | None = None
    """Directory of the prefix cache on disk; None caches in memory only."""
    prefix_cache_secret: bytes = field(default=b"", repr=False)
    """Secret that authenticates the files in that directory."""
    mtp: Path | None = None
    """A local directory with an MTP head, in place of the model's own."""
    spec_prefill: SpecPrefillSettings | None = None
    """None reads every prompt in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Description of the model of any worker."""

    model: str
    lanes: tuple[str, ...]
    context_tokens: int
    parameters: int
    """Number of parameters of the model and its MTP head."""
    weights_bytes: int
    """Memory of the parameters, which all lanes share."""
    fingerprint: str = ""
    """Digest of weights and tokenizer; empty if no other worker may go on with an answer."""
    group_size: int = 1
    """Machines that serve the model together."""
    default_max_tokens: int | None = None
    """The checkpoint's limit of an answer; None: only the context window limits it."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    vision: bool = False
    """Whether it takes pictures."""
    constrains_calls: bool = False
    """Whether a grammar can hold calls that the model may write: it knows the format of them."""
    system_inside: bool = False
    """Whether the chat template takes a system message behind others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCard(Card):
    """Description of an embedder or a reranker."""

    dimensions: int
    """The numbers of a vector; 1 for a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard(Card):
    """Description of the model that an engine serves."""

    lanes: tuple[LaneName, ...]
    mtp: bool = False
    looks_up: bool = False
    """Whether prompt lookup drafts."""
    mtp_unavailable_reason: str | None
    draft_tokens_requested: int = 0
    draft_tokens_effective: int = 0
    spec_prefill: str | None = None
    """Phrase on how long prompts are read; None if no draft model is configured."""


class Pooled(NamedTuple):
    """The result of an embedder or a reranker for one request."""

    numbers: NDArray[np.float32]
    """[texts or documents, numbers of each]."""
    tokens: int
    """Tokens of all rows, with those that the model adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine's report of its memory and of its prefix cache, if it knows."""

    memory_bytes: int = 0
    """Memory in use by MLX: weights, caches, activations."""
    memory_limit_bytes: int = 0
    """Limit of that memory."""
    failed_allocations: int = 0
    """Allocations of the device that have failed since the start."""
    prefix_cache_bytes: int = 0
    prefixes: tuple[str, ...] = ()
    """Keys of the cached prefixes, most recently used first."""
    evicted_prefixes: tuple[str, ...] = ()
    """Keys of the last evicted prefixes that are not on disk, the last one first."""
