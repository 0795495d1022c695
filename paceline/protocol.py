"""The protocol between a worker and its gateway, and between a worker and its parent process.

The report of a worker is the body of every heartbeat and part of `/v1/status`. Its counts start at
zero with every boot and never decrease: the total of a fleet is the sum over the last report of
every boot. The exit code and the ready line are for the parent process; an end by a signal has no
code here, such as the system's when memory runs out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from itertools import accumulate, zip_longest
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from paceline.addresses import BaseUrl
from paceline.names import PRINTABLE, Label, ModelName, Name
from paceline.request.profile import Endpoint, Sampling

PROTOCOL = 1
"""Number of this protocol. It grows by one with each change that an older side misunderstands."""
PAIRING_ENDED = "pairing_ended"
"""The code of the error for a worker whose pairing has ended."""
MAX_REPORTED_PREFIXES = 64
"""Cached prefixes that a report lists; a worker may have more."""
MAX_HELD_PREFIXES = 256
"""Cached prefixes that a report confirms; those of a worker with more take turns."""
NO_PREFIX = "-"
"""Sent for the key of a prefix that the worker must not cache, since others could find it."""
MAX_PREFIX_NAME_CHARS = 128
"""The longest key of a prefix that a gateway may send."""
KEYS_HEADER = "x-paceline-prefix-keys"
"""Of a request: the keys at the ends of its last messages, longest first, then that of its system
prompt, with commas between them; `NO_PREFIX` in place of a system prompt that is too short."""
MAX_PREFIX_KEYS = 5
"""Keys that a gateway sends with a request."""
PREFIX_CACHE_PATH = "/v1/prefix-cache"
"""The route of a worker that deletes its cache of isolation scopes."""
MAX_DELETED_SCOPES = 64
"""Scopes of one such request."""
PREFIX_FILES_TTL_S = 7 * 86_400.0
"""Time after its last use at which a worker deletes a file of its prefix cache."""
MAX_REPORT_BYTES = 256 * 1024
"""The largest body of a heartbeat, and of a worker's response with its report."""
MAX_COUNT = 2**53
"""The largest number of a report: JSON and Lua hold no larger one exactly."""
CONTENT_CODINGS = "gzip, deflate, zstd"
"""Of the bodies of requests, at both."""
TOKENIZE_PATH = "/tokenize"
"""The route of a worker, named as vLLM's, that counts the tokens of a chat's prompt."""
SCOPE_HEADER = "x-paceline-prefix-scope"
"""Of a request: requests with the same value may share cached prompts."""
_SALT_MARK = "."
SOURCES_HEADER = "x-paceline-prefix-sources"
"""Of a request: a list of `NodeSource` in JSON, the best first."""
MAX_SOURCES = 3
TOKENS_LIMIT_HEADER = "x-paceline-token-limit"
"""Of a request: the most tokens that its prompt and all its answers may have together."""
MODEL_HEADER = "x-paceline-model"
"""Of a request: the name of the model in the answer, if the client knows it by an alias; quoted."""
TOKENS_HEADER = "x-paceline-tokens"
"""Of the refusal of a request above that limit: the tokens that it may need."""
PROGRESS_HEADER = "x-paceline-progress"
"""Of a streamed request: each event of the answer has a line with its tokens so far."""
TOKENS_LINE = b": t "
"""Begins the line of an event: the text up to this event comes from the tokens of its choice in
this and earlier lines. Only a worker reads the rest."""
MORE_LINE = b": g\n"
"""The line of an event that is complete only with the next one."""
ANSWER_FIELD = "answer_so_far"
"""Of the body of a request: the lines of a stream that another worker has begun, with semicolons
between them. The worker continues, as if it had sent the stream up to there."""
CHECKS = "/v1/check"
"""Begins the paths at which a worker checks a request without generating: it responds with
`prompt_tokens`, or as it would refuse the request."""
MAX_DRAFT_TOKENS = 64
MAX_LANES = 16
MAX_LABELS = 64
EARLIER_BOOTS = "earlier:"
"""Begins the boot id of the sum of a worker's earlier boots; no worker may report one."""

PrefixName = Annotated[str, Field(pattern=rf"^{PRINTABLE}{{1,{MAX_PREFIX_NAME_CHARS}}}$")]
_EARLIER = rf"{EARLIER_BOOTS}{PRINTABLE}{{1,255}}"
BootId = Annotated[str, Field(pattern=rf"^([A-Za-z0-9][A-Za-z0-9._-]{{0,63}}|{_EARLIER})$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
DraftTokens = Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)]
_Reason = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
CountsByReason = Annotated[dict[_Reason, Count], Field(max_length=64)]


def _check_speed(speed: float) -> float:
    """Return a speed, or 0 if it is too low to be a measurement or a divisor."""
    return speed if speed >= 0.001 else 0.0


Speed = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False), AfterValidator(_check_speed)]


def speaks(protocol: int) -> bool:
    """Return whether this side understands the protocol: its own, and one step older or newer.

    So a fleet is upgraded machine by machine, in any order.
    """
    return abs(protocol - PROTOCOL) <= 1


def salted_scope(scope: str, digest: str) -> str:
    """Return the name of the part of an isolation scope for a `cache_salt` of this digest.

    A worker that deletes a scope deletes its parts too, which no gateway lists.
    """
    return f"{scope}{_SALT_MARK}{digest}"


def whole_scope(name: str) -> str:
    """Return the isolation scope of a name, which may be that of a part."""
    return name.partition(_SALT_MARK)[0]


class Record(BaseModel):
    """A frozen record; unknown fields are ignored, because a newer worker may send more.

    `build_records` builds all: not at the import, which would delay the report of a wrong flag.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


def build_records() -> None:
    """Build the validators of all records, as else their first use does: on an event loop."""
    for record in Record.__subclasses__():
        record.model_rebuild()


class NodeSource(Record):
    """A worker that may have read the beginning of a request's prompt."""

    url: BaseUrl
    tokens: Count
    """Tokens of the prompt that it is believed to have."""
    server_name: str = Field("", max_length=64)
    """The name in its certificate; '' for a worker without TLS."""


class DraftSource(StrEnum):
    """Where a draft token comes from."""

    HEAD = "head"
    """The MTP head."""
    LOOKUP = "lookup"
    """The tokens that followed the same ones before: in the prompt, this or an earlier answer."""
    FORCED = "forced"
    """The only token that the grammar of the answer allows."""


class Speculation(Record):
    """Counts of speculative decoding: of one request, or the sum over many.

    A step verifies one draft of one request; its bonus token does not count as accepted.
    `histogram[j]` is the number of steps that accepted exactly j tokens, as in vLLM's
    per-request metrics. `drafted == accepted + rejected + errors` always holds.
    """

    num_spec_tokens: DraftTokens = 0
    """k: the length of the longest draft."""
    steps: Count = 0
    drafted: Count = 0
    accepted: Count = 0
    errors: Count = 0
    """Draft tokens lost to a failure of the draft head or of the verification."""
    histogram: tuple[Count, ...] = Field(default=(), max_length=MAX_DRAFT_TOKENS + 1)
    drafted_by_source: CountsByReason = Field(default_factory=dict)
    """`drafted` by `DraftSource`; empty from a worker that does not report it."""
    accepted_by_source: CountsByReason = Field(default_factory=dict)

    @property
    def rejected(self) -> int:
        """Number of draft tokens that the target model did not choose."""
        return self.drafted - self.accepted - self.errors

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Number of steps that accepted the token, for each position of the draft."""
        return tuple(accumulate(reversed(self.histogram[1:])))[::-1]

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens per step, including the bonus token; 1.0 without drafts."""
        return 1.0 + (self.accepted / self.steps if self.steps else 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Share of verified draft tokens that were accepted; 0.0 without any."""
        verified = self.accepted + self.rejected
        return self.accepted / verified if verified else 0.0

    def __add__(self, other: Speculation) -> Speculation:
        """Return the sum of the counts, and the larger k; a sum may exceed the bound of a count."""
        return Speculation.model_construct(
            num_spec_tokens=max(self.num_spec_tokens, other.num_spec_tokens),
            steps=self.steps + other.steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            errors=self.errors + other.errors,
            histogram=tuple(map(sum, zip_longest(self.histogram, other.histogram, fillvalue=0))),
            drafted_by_source=_add(self.drafted_by_source, other.drafted_by_source),
            accepted_by_source=_add(self.accepted_by_source, other.accepted_by_source),
        )

    @property
    def by_source(self) -> dict[str, dict[str, int]]:
        """Return the attempted and the accepted draft tokens of each source."""
        return {
            source: {"attempted": drafted, "accepted": self.accepted_by_source.get(source, 0)}
            for source, drafted in sorted(self.drafted_by_source.items())
        }

    def as_request_metrics(self) -> dict[str, object]:
        """Return the counts in the format of vLLM's per-request metrics."""
        return {
            "num_spec_tokens": self.num_spec_tokens,
            "num_spec_steps": self.steps,
            "num_draft_tokens": self.drafted,
            "num_accepted_draft_tokens": self.accepted,
            "acceptance_histogram": list(self.histogram),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.acceptance_rate,
        }


def _check_consistency(speculation: Speculation) -> Speculation:
    """Reject impossible counts, which would falsify every sum over reports."""
    if speculation.rejected < 0:
        raise ValueError("more draft tokens are accepted or lost than drafted")
    if sum(speculation.histogram) > speculation.steps:
        raise ValueError("the histogram has more steps than 'steps'")
    if sum(speculation.drafted_by_source.values()) > speculation.drafted:
        raise ValueError("the sources have more draft tokens than 'drafted'")
    drafted = speculation.drafted_by_source
    accepted = speculation.accepted_by_source
    if sum(accepted.values()) > speculation.accepted:
        raise ValueError("the sources have more accepted tokens than 'accepted'")
    if any(count > drafted.get(source, 0) for source, count in accepted.items()):
        raise ValueError("a source has more accepted tokens than drafted ones")
    return speculation


class Counters(Record):
    """Counts since boot that add up field by field."""

    def __add__(self, other: Self) -> Self:
        """Return the sum of each field; of counts by reason, the sum for each reason."""
        sums = {name: _add(count, getattr(other, name)) for name, count in self}
        return self.model_construct(**sums)


def _add(first: Any, second: Any) -> Any:
    return dict(Counter(first) + Counter(second)) if isinstance(first, dict) else first + second


class SpecPrefillCounts(Counters):
    """Counts of sparse prefills of long prompts (SpecPrefill)."""

    prompts: Count = 0
    """Prompts that were prefilled sparsely."""
    scored_tokens: Count = 0
    """Their tokens that the draft model scored."""
    selected_tokens: Count = 0
    """Scored tokens that were prefilled."""
    full_prefills: CountsByReason = Field(default_factory=dict)
    """Other prompts, which were prefilled in full, by reason."""


class PrefixCounts(Counters):
    """Counts of the prefix cache."""

    hits: Count = 0
    """Prompts with a prefix in the cache, in memory or on disk."""
    misses: Count = 0
    """Prompts with a cacheable prefix that was not in the cache."""
    cached_tokens: Count = 0
    """Prompt tokens read from the cache."""
    tokens_by_kind: CountsByReason = Field(default_factory=dict)
    """These tokens by kind: from a `system` prompt, a `conversation`, from `disk`, or
    `moved` from another worker."""
    moves: CountsByReason = Field(default_factory=dict)
    """Transfers from other workers: `moved`, or why they ended before (`absent`, `slower` ...)."""
    too_large: Count = 0
    """Prompts and answers that were not stored, since they exceed the cache or the free memory."""


class TimeSaved(Counters):
    """Time saved by speculative decoding and by the prefix cache."""

    decode_ms: Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] = 0
    """Time of plain steps for the same tokens, less the time of the steps with drafts.

    Negative if drafts cost more time than they save; steps count only once the time of a plain
    step has been measured."""
    prefill_ms: Count = 0
    """Time of prefilling the cached tokens again, at the best measured speed."""


CRITICAL_PRESSURE = "critical"
"""The memory pressure at which a worker refuses requests."""
MTP_LANE = "text-mtp"
"""The lane with speculative decoding."""
POOLING_LANES: Mapping[str, Endpoint] = {
    Endpoint.EMBEDDINGS.value: Endpoint.EMBEDDINGS,
    Endpoint.RERANK.value: Endpoint.RERANK,
}
"""The lanes of embedders and rerankers, each with its only endpoint; a lane of any
other name generates text."""


_LANE_COUNTS = (
    *("speculation", "bypass_counts", "spec_prefill", "prefix", "time_saved"),
    *("requests", "prompt_tokens", "completion_tokens", "steps", "steps_ahead"),
)


class LaneReport(Record):
    """State and counts of one lane."""

    name: Name
    running: Count = 0
    waiting: Count = 0
    slots: Count = 1
    """Maximum number of rows in a batch."""
    pending_prefill_tokens: Count = 0
    """Prompt tokens of waiting and running requests that are not prefilled yet."""
    prefill_tokens_per_s: Speed = 0.0
    """Recent prefill speed; 0 before the first measurement."""
    decode_tokens_per_s: Speed = 0.0
    """Recent decode speed of one request; 0 before the first measurement."""
    mtp_enabled: bool = False
    requested_draft_tokens: DraftTokens = 0
    effective_draft_tokens: DraftTokens = 0
    """Draft length for a batch of the lane's own rows; 0 if drafts slow it down, as measured. The
    lanes share batches, so a larger one may draft less."""
    draft_tokens_by_rows: tuple[DraftTokens, ...] = Field(default=(), max_length=256)
    """Best draft length for batches of 1, 2, 3 ... rows, as far as measured."""
    draft_speedup_by_rows: tuple[Speed, ...] = Field(default=(), max_length=256)
    """Tokens per second with the head's best drafts relative to none, for 1, 2, 3 ... rows; 0 where
    it is not measured."""
    head_healthy: bool = True
    """False if the MTP head failed its self-test, or repeatedly since: the lane stops drafting."""
    speculation: Annotated[Speculation, AfterValidator(_check_consistency)] = Field(
        default_factory=Speculation
    )
    bypass_counts: CountsByReason = Field(default_factory=dict)
    spec_prefill: SpecPrefillCounts = Field(default_factory=SpecPrefillCounts)
    prefix: PrefixCounts = Field(default_factory=PrefixCounts)
    time_saved: TimeSaved = Field(default_factory=TimeSaved)
    requests: Count = 0
    """Finished requests since boot, including cancelled and failed ones."""
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    steps: Count = 0
    """Decoding steps, each for one batch."""
    steps_ahead: Count = 0
    """Steps that the worker read while the device computed another one."""

    def __add__(self, later: LaneReport) -> LaneReport:
        """Return the later report with the sums of the counts."""
        sums = {name: _add(getattr(self, name), getattr(later, name)) for name in _LANE_COUNTS}
        return later.model_copy(update=sums)

    def drafting_pays(self, rows: int) -> bool:
        """Return whether drafts speed up a batch of this size; True before any measurement."""
        measured = self.draft_tokens_by_rows
        return not measured or measured[min(rows, len(measured)) - 1] > 0


def _check_unique(lanes: tuple[LaneReport, ...]) -> tuple[LaneReport, ...]:
    """Reject lanes with the same name."""
    if len({lane.name for lane in lanes}) < len(lanes):
        raise ValueError("two lanes have the same name")
    return lanes


class StartStage(StrEnum):
    """A stage of the start of a worker, in order; a worker skips unnecessary ones."""

    DOWNLOAD = "download"
    WEIGHTS = "weights"
    KERNELS = "kernels"
    SELF_TEST = "self_test"


_STAGE_PHRASES: Mapping[str, str] = {
    StartStage.DOWNLOAD: "downloading the model",
    StartStage.WEIGHTS: "loading the weights",
    StartStage.KERNELS: "compiling kernels",
    StartStage.SELF_TEST: "testing the MTP head",
}


class StartProgress(Record):
    """How far the start of a worker is."""

    stage: _Reason
    """A `StartStage`; a newer worker may have others."""
    done: Count = 0
    """Of a download in bytes, of kernels and self-test in answers."""
    total: Count = 0
    """0 if unknown."""
    elapsed_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    """Time since the start began."""

    @property
    def description(self) -> str:
        """Return the stage for people, such as `compiling kernels, 2 of 3`."""
        phrase = _STAGE_PHRASES.get(self.stage, self.stage)
        if not self.total:
            return phrase
        if self.stage == StartStage.DOWNLOAD:
            return f"{phrase}, {self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB"
        return f"{phrase}, {self.done} of {self.total}"

    @property
    def summary(self) -> str:
        """Return the stage and the time since the start, for terminals and logs."""
        return f"{self.description} ({self.elapsed_s:.0f} s)"


class SamplingDefaults(Record):
    """Sampling values that the makers of a model recommend; None for others."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None

    def sampling(self) -> Sampling:
        """Return the defaults for requests, with OpenAI's for missing values."""
        return Sampling(**self.model_dump(exclude_none=True))


class WorkerReport(Record):
    """One consistent snapshot of a worker; every number, name and list is bounded."""

    worker_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    boot_id: BootId
    """New at every start, so that the counts of two boots are never mixed."""
    protocol: Count = 1
    """The worker's `PROTOCOL`; a report without it is of the first."""
    url: BaseUrl
    """Base URL for the gateway, such as http://192.168.1.20:9200, or with https for TLS."""
    public_key: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """Of the certificate of a paired worker; older workers do not report it."""
    certificate_until_s: Count = 0
    """When its certificate expires, in seconds since 1970; 0 without one."""
    model: ModelName
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{0,64}$")] = ""
    """Digest of weights and tokenizer: workers with the same one may continue each other's answers.
    Empty if unknown."""
    labels: tuple[Label, ...] = Field(default=(), max_length=MAX_LABELS)
    """Labels from its settings, for pools of the policy."""
    context_tokens: Count
    default_max_tokens: Count = 0
    """The longest answer to a request without `max_tokens`; 0 if unknown."""
    sampling: SamplingDefaults = Field(default_factory=SamplingDefaults)
    """Of the model's `generation_config.json`."""
    constrains_calls: bool = True
    """Whether tools with `strict`, or with a grammar, hold calls that the model may write; older
    workers do not report it."""
    system_inside: bool | None = None
    """Whether the chat template takes a system message behind others; else the worker renders it as
    words of the user in its place. Engines of other kinds, and older workers, do not report it."""
    sees_pictures: bool = True
    """Whether the model reads pictures; older workers do not report it."""
    ready: bool = True
    draining: bool = False
    start: StartProgress | None = None
    """None once the worker has started; until then it is not ready and lists no lanes."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Machines that serve the model together; `memory_bytes` and its limit are their sums."""
    memory_bytes: Count = 0
    memory_limit_bytes: Count = 0
    """Memory limit of MLX; 0 if unknown."""
    footprint_bytes: Count = 0
    """Memory of the whole process, as the kernel counts it."""
    footprint_limit_bytes: Count = 0
    """The limit of the process on this machine now; 0 if unknown."""
    memory_pressure: _Reason = "normal"
    """`normal`, `high` (new rows wait) or `CRITICAL_PRESSURE` (the worker refuses requests)."""
    failed_allocations: Count = 0
    """Allocations of the device that have failed since boot."""
    prefix_cache_bytes: Count = 0
    """Part of `memory_bytes` in use by the prefix cache."""
    prefixes: tuple[PrefixName, ...] = Field(default=(), max_length=MAX_REPORTED_PREFIXES)
    """Keys of cached prefixes, the most recently used first."""
    prefix_count: Count = 0
    """Number of cached prefixes; if `prefixes` lists fewer, a missing one may still be cached."""
    held_prefixes: tuple[PrefixName, ...] = Field(default=(), max_length=MAX_HELD_PREFIXES)
    """Further keys of prefixes in memory or on disk; in the end successive reports have all."""
    evicted_prefixes: tuple[PrefixName, ...] = Field(default=(), max_length=MAX_REPORTED_PREFIXES)
    """Keys of the last prefixes that were evicted and are not on disk, the last one first."""
    lanes: Annotated[
        tuple[LaneReport, ...], Field(max_length=MAX_LANES), AfterValidator(_check_unique)
    ]

    def bare(self) -> WorkerReport:
        """Return the identity of a worker without requests: no load, no counts."""
        bare = {"ready": False, "start": None, "lanes": (), "prefixes": (), "evicted_prefixes": ()}
        return self.model_copy(update=bare)


VLLM_COUNTERS = {
    "steps": ("vllm:spec_decode_num_drafts", "Drafts verified."),
    "drafted": ("vllm:spec_decode_num_draft_tokens", "Draft tokens."),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens."),
}
"""Prometheus name and help of counts of `Speculation`, as vLLM names them."""
COUNTERS_BY_SOURCE = {
    "drafted_by_source": (
        "paceline_worker_drafted_tokens",
        "Draft tokens by source: the MTP head, prompt lookup, or forced by a grammar.",
    ),
    "accepted_by_source": (
        "paceline_worker_accepted_tokens",
        "Accepted draft tokens by source.",
    ),
}
"""Prometheus name and help of the counts of `Speculation` by source."""
VLLM_ACCEPTED_PER_POSITION = (
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "Accepted draft tokens, by position in the draft.",
)


def mtp_block(lanes: tuple[LaneReport, ...]) -> dict[str, object]:
    """Return the `mtp` block of `/v1/status` for any set of lanes."""
    if not any(lane.mtp_enabled for lane in lanes):
        return {"enabled": False}
    counts = sum((lane.speculation for lane in lanes), Speculation())
    steps = counts.steps
    bypass: Counter[str] = Counter()
    for lane in lanes:
        bypass.update(lane.bypass_counts)
    return {
        "enabled": True,
        "requested_draft_tokens": max(lane.requested_draft_tokens for lane in lanes),
        "effective_draft_tokens": max(lane.effective_draft_tokens for lane in lanes),
        "drafts": steps,
        "attempted": counts.drafted,
        "accepted": counts.accepted,
        "rejected": counts.rejected,
        "errors": counts.errors,
        "acceptance_rate": counts.acceptance_rate,
        "mean_acceptance_length": counts.mean_acceptance_length,
        "acceptance_rate_per_position": [
            count / steps if steps else 0.0 for count in counts.accepted_per_position
        ],
        "sources": counts.by_source,
        "bypass_counts": dict(sorted(bypass.items())),
    }


RUNNING_USAGE_TOKENS = 32
"""A stream of a worker reports its usage so far at least as often, if the request asks for it."""
KEEPALIVE_S = 10.0
"""A stream that has sent nothing for so long sends a comment, or its head if it has not begun."""
_CONTROLS = bytes((*range(32), 127))
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


def header_value(value: bytes) -> bytes:
    """Return the value of a header, or of a comment in a stream, without control characters.

    It may hold a client's text, which would end its line; such characters are percent-encoded.
    """
    if len(value.translate(None, _CONTROLS)) == len(value):
        return value
    return _CONTROL.sub(lambda found: b"%%%02X" % found[0][0], value)


REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""An `x-request-id` of a client that is safe to log and to send on."""


class ApiError(Exception):
    """A request that gets an error response in OpenAI's shape; the message is for the client."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    message = ""
    param: str | None = None
    retry_after_s: float | None = None

    def __init_subclass__(
        cls, *, status: int | None = None, kind: str | None = None, code: str | None = None
    ) -> None:
        """Set the status, the type and the code of a class; others are those of its parent."""
        super().__init_subclass__()
        cls.status = status or cls.status
        cls.type = kind or cls.type
        if code is not None:
            cls.code = code

    def __init__(
        self, message: str | None = None, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message or self.message)
        self.message = self.message if message is None else message
        self.param = self.param if param is None else param
        self.code = code or self.code

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the body of the response."""
        fields = {"type": self.type, "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **fields}}


READY_PREFIX = "PACELINE_WORKER_READY "
"""Begins the line that `paceline worker` prints once it accepts requests; JSON follows."""


START_PREFIX = "PACELINE_WORKER_START "
"""Begins the lines that a worker prints for the process that started it; a `StartProgress` follows
as JSON."""


class ExitCode(IntEnum):
    """Exit codes of `paceline worker`."""

    ENDED = 0
    """The worker shut down as requested."""
    CRASHED = 1
    """An unexpected error; Python's own exit code."""
    SETTINGS = 2
    """The settings are invalid."""
    MODEL = 3
    """The model cannot be loaded."""
    ENGINE_DIED = 4
    """The engine failed for good: every request would fail."""
    NOT_ADMITTED = 5
    """The gateway rejects the join token, or speaks another protocol."""
    INTERRUPTED = 130
    """Ctrl-C during the start."""
