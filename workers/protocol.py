"""The protocol between a worker and its gateway, and between a worker and its parent process.

The report of a worker is the body of every heartbeat and part of `/v1/status`. Its counts start at
zero with every boot and never decrease: the total of a fleet is the sum over the last report of
every boot. The exit code and the ready line are for the parent process; an end by a signal has no
code here: MLX aborts the process if a GPU kernel fails, and the system kills it if memory runs out.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from itertools import zip_longest
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
)

from policies.base import Label

MAX_REPORTED_PREFIXES = 64
"""Cached prefixes that a report lists; a worker may have more."""
MAX_PREFIX_NAME_CHARS = 128
"""The longest key of a prefix that a gateway may send."""
PrefixName = Annotated[str, Field(max_length=MAX_PREFIX_NAME_CHARS)]


class Record(BaseModel):
    """A frozen record without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Speculation(Record):
    """Counts of speculative decoding: of one request, or the sum over many.

    A step verifies one draft of one request; its bonus token does not count as accepted.
    `histogram[j]` is the number of steps that accepted exactly j tokens, as in vLLM's
    per-request metrics. `drafted == accepted + rejected + errors` always holds.
    """

    num_spec_tokens: NonNegativeInt = 0
    """k: the length of the longest draft."""
    steps: NonNegativeInt = 0
    drafted: NonNegativeInt = 0
    accepted: NonNegativeInt = 0
    errors: NonNegativeInt = 0
    """Draft tokens lost to a failure of the draft head or of the verification."""
    histogram: tuple[NonNegativeInt, ...] = ()

    @property
    def rejected(self) -> int:
        """Number of draft tokens that the target model did not choose."""
        return self.drafted - self.accepted - self.errors

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Number of steps that accepted the token, for each position of the draft."""
        return tuple(sum(self.histogram[i + 1 :]) for i in range(len(self.histogram) - 1))

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
        """Return the sum of the counts, and the larger k."""
        return Speculation(
            num_spec_tokens=max(self.num_spec_tokens, other.num_spec_tokens),
            steps=self.steps + other.steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            errors=self.errors + other.errors,
            histogram=tuple(map(sum, zip_longest(self.histogram, other.histogram, fillvalue=0))),
        )

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
    return speculation


class Counters(Record):
    """Counts since boot that add up field by field."""

    def __add__(self, other: Self) -> Self:
        """Return the sum of each field; of counts by reason, the sum for each reason."""
        return type(self)(**{name: _add(count, getattr(other, name)) for name, count in self})


def _add(first: Any, second: Any) -> Any:
    return dict(Counter(first) + Counter(second)) if isinstance(first, dict) else first + second


class SpecPrefillCounts(Counters):
    """Counts of sparse prefills of long prompts (SpecPrefill)."""

    prompts: NonNegativeInt = 0
    """Prompts that were prefilled sparsely."""
    scored_tokens: NonNegativeInt = 0
    """Their tokens that the draft model scored."""
    selected_tokens: NonNegativeInt = 0
    """Scored tokens that were prefilled."""
    full_prefills: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Other prompts, which were prefilled in full, by reason."""


class PrefixCounts(Counters):
    """Counts of the prefix cache."""

    hits: NonNegativeInt = 0
    """Prompts with a prefix in the cache, in memory or on disk."""
    misses: NonNegativeInt = 0
    """Prompts with a cacheable prefix that was not in the cache."""
    cached_tokens: NonNegativeInt = 0
    """Prompt tokens read from the cache."""


class TimeSaved(Counters):
    """Time saved by speculative decoding and by the prefix cache."""

    decode_ms: int = 0
    """Time of plain steps for the same tokens, less the time of the steps with drafts.

    Negative if drafts cost more time than they save; steps count only once the time of a plain
    step has been measured."""
    prefill_ms: NonNegativeInt = 0
    """Time of prefilling the cached tokens again, at the best measured speed."""


MTP_LANE = "text-mtp"
"""The lane with speculative decoding."""


_LANE_COUNTS = (
    *("speculation", "bypass_counts", "spec_prefill", "prefix", "time_saved"),
    *("requests", "prompt_tokens", "completion_tokens"),
)


class LaneReport(Record):
    """State and counts of one lane."""

    name: str
    running: NonNegativeInt = 0
    waiting: NonNegativeInt = 0
    slots: NonNegativeInt = 1
    """Maximum number of rows in a batch."""
    pending_prefill_tokens: NonNegativeInt = 0
    """Prompt tokens of waiting and running requests that are not prefilled yet."""
    prefill_tokens_per_s: NonNegativeFloat = 0.0
    """Recent prefill speed; 0 before the first measurement."""
    decode_tokens_per_s: NonNegativeFloat = 0.0
    """Recent decode speed of one request; 0 before the first measurement."""
    mtp_enabled: bool = False
    requested_draft_tokens: NonNegativeInt = 0
    effective_draft_tokens: NonNegativeInt = 0
    """Current draft length; 0 if drafts slow down the current batch size, as measured."""
    draft_tokens_by_rows: tuple[NonNegativeInt, ...] = ()
    """Best draft length for batches of 1, 2, 3 ... rows, as far as measured."""
    head_healthy: bool = True
    """False if the MTP head failed its self-test, or repeatedly since: the lane stops drafting."""
    speculation: Annotated[Speculation, AfterValidator(_check_consistency)] = Field(
        default_factory=Speculation
    )
    bypass_counts: dict[str, NonNegativeInt] = Field(default_factory=dict)
    spec_prefill: SpecPrefillCounts = Field(default_factory=SpecPrefillCounts)
    prefix: PrefixCounts = Field(default_factory=PrefixCounts)
    time_saved: TimeSaved = Field(default_factory=TimeSaved)
    requests: NonNegativeInt = 0
    """Finished requests since boot, including cancelled and failed ones."""
    prompt_tokens: NonNegativeInt = 0
    completion_tokens: NonNegativeInt = 0

    def __add__(self, later: LaneReport) -> LaneReport:
        """Return the later report with the sums of the counts."""
        sums = {name: _add(getattr(self, name), getattr(later, name)) for name in _LANE_COUNTS}
        return later.model_copy(update=sums)

    def drafting_pays(self, rows: int) -> bool:
        """Return whether drafts speed up a batch of this size; True before any measurement."""
        measured = self.draft_tokens_by_rows
        return not measured or measured[min(rows, len(measured)) - 1] > 0


class WorkerReport(Record):
    """One consistent snapshot of a worker."""

    worker_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    boot_id: str
    """New at every start, so that the counts of two boots are never mixed."""
    url: str
    """Base URL for the gateway, such as http://192.168.1.20:9200."""
    model: str
    labels: tuple[Label, ...] = ()
    """Labels from its settings, for pools of the policy."""
    context_tokens: NonNegativeInt
    ready: bool = True
    draining: bool = False
    memory_bytes: NonNegativeInt = 0
    memory_limit_bytes: NonNegativeInt = 0
    """Memory limit of MLX; 0 if unknown."""
    prefix_cache_bytes: NonNegativeInt = 0
    """Part of `memory_bytes` in use by the prefix cache."""
    prefixes: tuple[PrefixName, ...] = Field(default=(), max_length=MAX_REPORTED_PREFIXES)
    """Keys of cached prefixes, the most recently used first."""
    prefix_count: NonNegativeInt = 0
    """Number of cached prefixes; if `prefixes` lists fewer, a missing one may still be cached."""
    lanes: tuple[LaneReport, ...]


VLLM_COUNTERS = {
    "steps": ("vllm:spec_decode_num_drafts", "Drafts verified."),
    "drafted": ("vllm:spec_decode_num_draft_tokens", "Draft tokens."),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens."),
}
"""Prometheus name and help of counts of `Speculation`, as vLLM names them."""
VLLM_ACCEPTED_PER_POSITION = (
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "Accepted draft tokens, by position in the draft.",
)


def mtp_block(lanes: tuple[LaneReport, ...]) -> dict[str, object]:
    """Return the `mtp` block of `/v1/status` for any set of lanes."""
    if not any(lane.mtp_enabled for lane in lanes):
        return {"enabled": False}
    total = sum((lane.speculation for lane in lanes), Speculation())
    bypass: Counter[str] = Counter()
    for lane in lanes:
        bypass.update(lane.bypass_counts)
    return draft_block(
        total,
        max(lane.requested_draft_tokens for lane in lanes),
        max(lane.effective_draft_tokens for lane in lanes),
        bypass,
    )


def draft_block(
    counts: Speculation, requested: int, effective: int, bypass: Mapping[str, int]
) -> dict[str, object]:
    """Return an `mtp` block; `requested` and `effective` are the lengths of drafts."""
    steps = counts.steps
    return {
        "enabled": True,
        "requested_draft_tokens": requested,
        "effective_draft_tokens": effective,
        "drafts": steps,
        "attempted": counts.drafted,
        "accepted": counts.accepted,
        "rejected": counts.rejected,
        "errors": counts.errors,
        "acceptance_rate": counts.acceptance_rate,
        "mean_acceptance_length": counts.mean_acceptance_length,
        # At most 1, also for the counts in responses, whose consistency nothing checks.
        "acceptance_rate_per_position": [
            min(1.0, count / steps) if steps else 0.0 for count in counts.accepted_per_position
        ],
        "bypass_counts": dict(sorted(bypass.items())),
    }


RUNNING_USAGE_TOKENS = 32
"""A stream of a worker tells its usage so far at least as often, if the request asks for it."""
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


class NotHttp(ApiError, status=400, kind="invalid_request_error", code="invalid_http"):
    """The bytes are not an HTTP/1.1 request."""

    message = "This is not a valid HTTP/1.1 request."


class HeadTooSlow(NotHttp, status=408, code="headers_timeout"):
    """The headers did not arrive in time."""

    message = "The headers of the request did not arrive in time."


class HeadTooLarge(NotHttp, status=431, code="headers_too_large"):
    """The headers are larger, or more, than the limit."""

    limit_bytes = 32 * 1024
    """As much as nginx takes."""
    limit_headers = 100
    message = (
        f"A request may have at most {limit_headers} headers with {limit_bytes} bytes in total."
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address; of names, only localhost does."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


READY_PREFIX = "PACELINE_WORKER_READY "
"""Begins the line that `paceline worker` prints once it accepts requests; JSON follows."""


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
    INTERRUPTED = 130
    """Ctrl-C while the weights were loading."""
