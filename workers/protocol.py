"""The report of a worker: what it serves, how busy it is, what speculation brought.

It travels in every heartbeat and stands in `/v1/status`. Counts are those of one boot of one
worker and only grow; whoever adds workers up adds the last report of every boot.

What a worker's process tells who started it: where it listens, and why it ended.

An end by a signal has no code of ours: MLX aborts the process where a kernel fails on the GPU, and
the system ends it where memory cannot be had. A supervisor starts it again in both cases.

What the gateway knows of engines: the report every worker makes, and who can make it.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from enum import IntEnum
from typing import Annotated

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
"""Of the system prompts that a worker holds, so many stand in its report."""
MAX_PREFIX_NAME_CHARS = 128
"""The longest name that a system prompt may be given."""
PrefixName = Annotated[str, Field(max_length=MAX_PREFIX_NAME_CHARS)]


class Record(BaseModel):
    """A frozen record that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Speculation(Record):
    """Draft and verify counts of one request, or the sum over many.

    A step is one verify of one request's draft; the bonus token is not an accepted one.
    `histogram[j]` counts the steps that accepted exactly j (vLLM #48915), so that
    `attempted == accepted + rejected + errors` holds at every moment.
    """

    num_spec_tokens: NonNegativeInt = 0
    """k, the largest draft of any step."""
    steps: NonNegativeInt = 0
    drafted: NonNegativeInt = 0
    accepted: NonNegativeInt = 0
    errors: NonNegativeInt = 0
    """Draft tokens asked for that the drafter failed to bring or the verify to judge."""
    histogram: tuple[NonNegativeInt, ...] = ()

    @property
    def rejected(self) -> int:
        """Count the drafted tokens that the target did not choose."""
        return self.drafted - self.accepted - self.errors

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Count, for each draft position, the steps that accepted it."""
        return tuple(sum(self.histogram[i + 1 :]) for i in range(len(self.histogram) - 1))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step, the bonus token included; 1.0 when nothing was drafted."""
        return 1.0 + (self.accepted / self.steps if self.steps else 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over judged draft tokens; 0.0 when none was judged."""
        judged = self.accepted + self.rejected
        return self.accepted / judged if judged else 0.0

    def __add__(self, other: Speculation) -> Speculation:
        """Add two counts; histograms of different k are aligned at zero."""
        length = max(len(self.histogram), len(other.histogram))
        mine = self.histogram + (0,) * (length - len(self.histogram))
        theirs = other.histogram + (0,) * (length - len(other.histogram))
        return Speculation(
            num_spec_tokens=max(self.num_spec_tokens, other.num_spec_tokens),
            steps=self.steps + other.steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            errors=self.errors + other.errors,
            histogram=tuple(a + b for a, b in zip(mine, theirs, strict=True)),
        )

    def as_request_metrics(self) -> dict[str, object]:
        """Render vLLM's per-request shape (DESIGN section 5)."""
        return {
            "num_spec_tokens": self.num_spec_tokens,
            "num_spec_steps": self.steps,
            "num_draft_tokens": self.drafted,
            "num_accepted_draft_tokens": self.accepted,
            "acceptance_histogram": list(self.histogram),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.acceptance_rate,
        }


def _possible(told: Speculation) -> Speculation:
    """Refuse counts that no drafting can have: they would spoil every sum that they are in."""
    if told.rejected < 0:
        raise ValueError("more draft tokens were accepted, or failed, than were drafted")
    if sum(told.histogram) > told.steps:
        raise ValueError("the histogram counts more steps than there were")
    return told


class SpecPrefillCounts(Record):
    """What sparse reading of long prompts did, since boot."""

    prompts: NonNegativeInt = 0
    """Read sparsely."""
    scored_tokens: NonNegativeInt = 0
    selected_tokens: NonNegativeInt = 0
    """Of the scored ones, those that were read."""
    full_prefills: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Prompts that were not, by reason."""

    def __add__(self, other: SpecPrefillCounts) -> SpecPrefillCounts:
        """Add two counts."""
        return SpecPrefillCounts(
            prompts=self.prompts + other.prompts,
            scored_tokens=self.scored_tokens + other.scored_tokens,
            selected_tokens=self.selected_tokens + other.selected_tokens,
            full_prefills=dict(Counter(self.full_prefills) + Counter(other.full_prefills)),
        )


class PrefixCounts(Record):
    """What was found of the system prompts that requests share, since boot."""

    hits: NonNegativeInt = 0
    """Prompts whose beginning came out of a snapshot, from memory or from disk."""
    misses: NonNegativeInt = 0
    """Prompts with such a beginning that had to be read."""
    cached_tokens: NonNegativeInt = 0
    """Prompt tokens that were not read again."""

    def __add__(self, other: PrefixCounts) -> PrefixCounts:
        """Add two counts."""
        return PrefixCounts(
            hits=self.hits + other.hits,
            misses=self.misses + other.misses,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )


class TimeSaved(Record):
    """What drafting and kept system prompts have saved, in milliseconds, since boot."""

    decode_ms: int = 0
    """What the tokens of drafted steps would have taken by plain ones, less what they took.

    Below zero where drafting costs more than it brings; steps whose plain cost is not yet measured
    count nothing."""
    prefill_ms: NonNegativeInt = 0
    """What reading again would have taken, at the best speed that was measured."""

    def __add__(self, other: TimeSaved) -> TimeSaved:
        """Add two counts."""
        return TimeSaved(
            decode_ms=self.decode_ms + other.decode_ms,
            prefill_ms=self.prefill_ms + other.prefill_ms,
        )


MTP_LANE = "text-mtp"
"""The lane that drafts."""


class LaneReport(Record):
    """One lane at one moment."""

    name: str
    running: NonNegativeInt = 0
    waiting: NonNegativeInt = 0
    slots: NonNegativeInt = 1
    """Rows that may run side by side."""
    pending_prefill_tokens: NonNegativeInt = 0
    """Prompt tokens of those that wait or are being read, which are still to be read."""
    prefill_tokens_per_s: NonNegativeFloat = 0.0
    """Prompt tokens that it reads in a second, as measured lately; 0 while that is not known."""
    decode_tokens_per_s: NonNegativeFloat = 0.0
    """Tokens that one answer gets in a second, as measured lately; 0 while that is not known."""
    mtp_enabled: bool = False
    requested_draft_tokens: NonNegativeInt = 0
    effective_draft_tokens: NonNegativeInt = 0
    """Drafted at present: 0 where that was measured not to pay at the batch size of the moment."""
    draft_tokens_by_rows: tuple[NonNegativeInt, ...] = ()
    """What it pays to draft for 1, 2, 3 ... rows side by side, as far as that has been measured."""
    head_healthy: bool = True
    """False when the MTP head failed its self-test or goes on failing: the lane serves plainly."""
    speculation: Annotated[Speculation, AfterValidator(_possible)] = Field(
        default_factory=Speculation
    )
    bypass_counts: dict[str, NonNegativeInt] = Field(default_factory=dict)
    spec_prefill: SpecPrefillCounts = Field(default_factory=SpecPrefillCounts)
    prefix: PrefixCounts = Field(default_factory=PrefixCounts)
    time_saved: TimeSaved = Field(default_factory=TimeSaved)
    requests: NonNegativeInt = 0
    """Finished since boot, cancelled and failed ones too."""
    prompt_tokens: NonNegativeInt = 0
    completion_tokens: NonNegativeInt = 0

    def drafting_pays(self, rows: int) -> bool:
        """Say whether drafting was found to pay for so many rows; unless measured, it does."""
        measured = self.draft_tokens_by_rows
        return not measured or measured[min(rows, len(measured)) - 1] > 0


class WorkerReport(Record):
    """One worker at one moment, read as one consistent snapshot."""

    worker_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    boot_id: str
    """New at every start, so that counts of two lives are never mixed."""
    url: str
    """Where the gateway reaches it, e.g. http://192.168.1.20:9200."""
    model: str
    labels: tuple[Label, ...] = ()
    """What its admin says of it, for pools of the policy to choose by."""
    context_tokens: NonNegativeInt
    ready: bool = True
    draining: bool = False
    memory_bytes: NonNegativeInt = 0
    memory_limit_bytes: NonNegativeInt = 0
    """What it may use at most; 0 where that is not known."""
    prefix_cache_bytes: NonNegativeInt = 0
    """Of these in use, what is kept of system prompts."""
    prefixes: tuple[PrefixName, ...] = Field(default=(), max_length=MAX_REPORTED_PREFIXES)
    """The system prompts that it holds by the names that it was given, the last one used first."""
    prefix_count: NonNegativeInt = 0
    """How many it holds; what is not among `prefixes` is evicted only where these are all."""
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
    """Render the `mtp` block of `/v1/status` for any set of lanes (DESIGN section 5)."""
    if not any(lane.mtp_enabled for lane in lanes):
        return {"enabled": False}
    total = sum((lane.speculation for lane in lanes), Speculation())
    bypass: dict[str, int] = {}
    for lane in lanes:
        for reason, count in lane.bypass_counts.items():
            bypass[reason] = bypass.get(reason, 0) + count
    steps = total.steps
    return {
        "enabled": True,
        "requested_draft_tokens": max(lane.requested_draft_tokens for lane in lanes),
        "effective_draft_tokens": max(lane.effective_draft_tokens for lane in lanes),
        "drafts": steps,
        "attempted": total.drafted,
        "accepted": total.accepted,
        "rejected": total.rejected,
        "errors": total.errors,
        "acceptance_rate": total.acceptance_rate,
        "mean_acceptance_length": total.mean_acceptance_length,
        "acceptance_rate_per_position": [
            count / steps if steps else 0.0 for count in total.accepted_per_position
        ],
        "bypass_counts": dict(sorted(bypass.items())),
    }


REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""An `x-request-id` of a client that is safe to log and to send on."""


def error_body(
    message: str, *, kind: str, param: str | None, code: str | None
) -> dict[str, dict[str, str | None]]:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


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
"""Opens the line by which `paceline worker` tells a program where it listens; JSON follows."""


class ExitCode(IntEnum):
    """The codes of `paceline worker`."""

    ENDED = 0
    """Asked to end, and did."""
    CRASHED = 1
    """An error that nobody foresaw; Python's own code for it."""
    SETTINGS = 2
    """Settings that cannot work."""
    MODEL = 3
    """A model that cannot be served."""
    ENGINE_DIED = 4
    """The engine can compute nothing any more: every answer would fail."""
    INTERRUPTED = 130
    """Ctrl-C while the weights were loading."""
