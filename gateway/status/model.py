"""The typed model of `/v1/status`, and the JSON Schema that is generated from it.

No value is null and no field is left out: absence is 0, an empty string or an empty list. The one
exception is `mtp`, which is `{"enabled": false}` if no lane drafts.

Counts only grow, survive restarts and cover all gateways that share a Redis. `gateway`, `recent`,
`last_minute`, `last_hour`, `history` and `in_flight` cover the gateway that answers. `recent` and
`history` cover the window of the query (`?window=5m`) and the requests that reached a worker.

`python -m gateway.status.model > docs/status.schema.json` writes the schema; a test fails if the
file is out of date.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt

from policies.json_schema import UntitledSchema, to_text

Share = Annotated[float, Field(ge=0, le=1)]


class StatusModel(BaseModel):
    """A frozen part of the status that has exactly these fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Percentiles(StatusModel):
    """Distribution of the values in the window; correct to about an eighth (histogram buckets)."""

    count: NonNegativeInt
    """Number of values; if 0, the percentiles are 0."""
    p50: NonNegativeFloat
    p95: NonNegativeFloat


class MtpOff(StatusModel):
    """No lane drafts."""

    enabled: Literal[False]


class SourceCounts(StatusModel):
    """Draft tokens of one source."""

    attempted: NonNegativeInt
    accepted: NonNegativeInt


class MtpOn(StatusModel):
    """Draft counts; `attempted == accepted + rejected + errors` at every moment."""

    enabled: Literal[True]
    requested_draft_tokens: NonNegativeInt
    """The configured k, the largest of the present lanes."""
    effective_draft_tokens: NonNegativeInt
    """The k for a batch of a lane's own rows, the largest of the present lanes; 0 if drafts were
    measured not to pay there. The lanes share batches, so a larger one may draft less."""
    drafts: NonNegativeInt
    """Number of drafts verified."""
    attempted: NonNegativeInt
    """Draft tokens."""
    accepted: NonNegativeInt
    rejected: NonNegativeInt
    errors: NonNegativeInt
    """Draft tokens lost to a failure of the drafter or of the verify step."""
    acceptance_rate: Share
    """Accepted draft tokens over accepted and rejected ones."""
    mean_acceptance_length: Annotated[float, Field(ge=1)]
    """Tokens per step, including the token of a plain step."""
    acceptance_rate_per_position: tuple[Share, ...]
    """For each draft position, the share of drafts accepted up to and including it."""
    sources: dict[str, SourceCounts]
    """Draft tokens by source: the MTP `head`, prompt `lookup`, or a grammar that `forced` them;
    without workers that do not report it."""
    bypass_counts: dict[str, NonNegativeInt]
    """Requests that were not drafted for, by reason, as counted by the workers."""


Mtp = MtpOff | MtpOn


class Savings(StatusModel):
    """Steps, tokens and time saved by drafting and by the prefix cache, as measured by workers."""

    decode_steps: NonNegativeInt
    """Accepted draft tokens: each saved one step of the model."""
    decode_s: float
    """Seconds that these tokens would have taken at the measured cost of a plain step, less the
    time of the drafted steps. Negative if drafting cost more than it saved."""
    prompt_tokens: NonNegativeInt
    """Prompt tokens that came from the prefix cache."""
    prompt_s: NonNegativeFloat
    """Seconds that prefilling them would have taken at the measured speed."""


class Recent(StatusModel):
    """Requests that reached a worker and ended in the window: of all pools, or of one."""

    requests: NonNegativeInt
    """With whatever outcome."""
    first_token_s: Percentiles
    """From the complete request body to the first content; streams only."""
    token_s: Percentiles
    """Seconds per token after the first one: at the worker, or of a stream as it comes."""
    request_tokens_per_s: Percentiles
    """Tokens per second of one answer after its first token, by the same times."""
    wait_s: Percentiles
    """Time in the queue, of requests that had to wait for a slot."""
    duration_s: Percentiles
    """From the first byte of the request to the last byte of its complete response."""


class AnswerCounts(StatusModel):
    """Requests that got a response within a time, whatever window the query requests."""

    answered: NonNegativeInt
    errors: NonNegativeInt
    """The part of `answered` whose response is an error, or ends in one."""


class Window(StatusModel):
    """The time that `recent` and `history` cover."""

    coverage_s: NonNegativeFloat
    """Less than the query requested if the gateway started later."""


class Point(StatusModel):
    """A few seconds of the window."""

    age_s: NonNegativeFloat
    """Seconds since its end."""
    interval_s: NonNegativeFloat
    """Its length."""
    requests: NonNegativeInt
    tokens_per_s: NonNegativeFloat
    first_token_s: Percentiles
    duration_s: Percentiles
    attempted: NonNegativeInt
    """Draft tokens, as reported in responses."""
    accepted: NonNegativeInt


WorkerCondition = Literal[
    "ready",
    "starting",
    "draining",
    "unreachable",
    "cordoned",
    "ejected",
    "busy",
    "probation",
    "gone",
]


class Unreported(StatusModel):
    """Complete answers of engines that did not report a number; sums leave these answers out.

    If nearly all requests are among them, the number is unknown and not zero.
    """

    usage: NonNegativeInt
    """Prompt and completion tokens."""
    cached_tokens: NonNegativeInt
    drafts: NonNegativeInt


class LaneStatus(StatusModel):
    """One lane of one worker; counts cover all its boots."""

    unreported: Unreported
    mtp: Mtp
    slots: NonNegativeInt
    """Rows that may run at the same time; 0 if the worker is gone."""
    running: NonNegativeInt
    """As reported by the worker."""
    waiting: NonNegativeInt
    """As reported by the worker."""
    in_flight: NonNegativeInt
    """Requests that this gateway sent and whose response has not ended."""
    requests: NonNegativeInt
    completion_tokens: NonNegativeInt
    pending_prefill_tokens: NonNegativeInt
    """Prompt tokens of its requests that the worker has still to read."""
    prefill_tokens_per_s: NonNegativeFloat
    """Its recent speed of reading prompts; 0 if unknown."""
    head_healthy: bool
    """False if the MTP head failed its self-test or keeps failing; the lane then decodes without
    its drafts."""


class Ejection(StatusModel):
    """The current ejection by the circuit breaker; both fields are empty without one."""

    remaining_s: NonNegativeFloat
    reason: str


class StartStatus(StatusModel):
    """The start of a worker; both fields are empty if it has started or is gone."""

    description: str
    """The stage for people, such as `compiling kernels, 2 of 3`."""
    elapsed_s: NonNegativeFloat
    """Seconds since the start began."""


class Absence(StatusModel):
    """Why a worker is gone; all fields are empty if it is not, or if this gateway does not know."""

    kind: Literal["", "restarting", "silent", "left"]
    """`restarting`: its process ended, and `paceline up` starts it again; `silent`: its heartbeats
    stopped; `left`: it signed off."""
    unix_s: NonNegativeFloat
    """The end of the process, or the last heartbeat, in seconds since the epoch."""


class WorkerStatus(StatusModel):
    """One worker; counts cover all its boots, past ones too."""

    unreported: Unreported
    savings: Savings
    mtp: Mtp
    state: WorkerCondition
    """`gone`: it signed off or its heartbeats stopped; `probation`: it is given requests one by
    one after an ejection; `busy`: it asked for a pause; `unreachable`: this gateway gets its
    heartbeats and no connection to it."""
    problem: str
    """Why the worker is unreachable, or that another one wants its id, and the remedy; empty
    without such a problem."""
    kind: str
    """`paceline`, or the kind of another engine; empty if the worker is gone."""
    tls: bool
    """Whether the gateways call it over TLS, as they do paired workers."""
    model: str
    models: tuple[str, ...]
    """All models that it serves now."""
    labels: tuple[str, ...]
    boots: NonNegativeInt
    context_tokens: NonNegativeInt
    group_size: NonNegativeInt
    """Machines that serve the model together; `memory_bytes` is of all of them."""
    memory_bytes: NonNegativeInt
    prefix_cache_bytes: NonNegativeInt
    """The part of `memory_bytes` that the prefix cache uses."""
    prefix_moves: dict[str, NonNegativeInt]
    """Transfers of earlier turns from other workers: `moved`, or why they ended before (`absent`,
    `slower`, `busy`, `too_large`, `other_model`, `failed`)."""
    heartbeat_age_s: NonNegativeFloat
    """Seconds since the last heartbeat."""
    start: StartStatus
    absence: Absence
    """A worker that is started again keeps it until it is ready."""
    ejection: Ejection
    lanes: dict[str, LaneStatus]


class PoolStatus(StatusModel):
    """One pool of the policy; counts cover its lanes on all workers."""

    unreported: Unreported
    mtp: Mtp
    recent: Recent
    lanes: tuple[str, ...]
    workers: tuple[str, ...]
    """Workers that take requests now."""
    slots: NonNegativeInt
    running: NonNegativeInt
    waiting: NonNegativeInt
    """Requests queued in this gateway and, if several gateways send, at the workers."""
    in_flight: NonNegativeInt
    """Requests that this gateway sent and whose response has not ended."""
    requests: NonNegativeInt
    completion_tokens: NonNegativeInt


class Tokens(StatusModel):
    """Tokens of the requests that passed through the gateways."""

    prompt: NonNegativeInt
    completion: NonNegativeInt
    cached: NonNegativeInt
    """The part of the prompt tokens that came from a prefix cache."""


class ModelStatus(StatusModel):
    """One model, on all workers that serve it."""

    mtp: Mtp
    workers: tuple[str, ...]
    tokens: Tokens


class GatewayStatus(StatusModel):
    """The gateway that answers."""

    ready: bool
    stopping: bool
    uptime_s: NonNegativeFloat
    requests_in_flight: NonNegativeInt
    added_latency_s: Percentiles
    """From the complete request body to its dispatch to a worker, less the time in the queue."""


class StoreStatus(StatusModel):
    """Where state is stored, and its condition."""

    kind: Literal["memory", "redis"]
    state: Literal["ok", "degraded"]
    problem: str
    """Why this gateway cannot exchange state with others over Redis; empty if it can."""
    file_problem: str
    """Why the state folder cannot be read or written, with its path; empty if it can."""
    record_problem: str
    """Which stored records this version of Paceline cannot use; empty if it can use all."""
    gateways: NonNegativeInt
    """Gateways that share the store now."""


class PolicyStatus(StatusModel):
    """The active version of the policy."""

    version: NonNegativeInt
    source: Literal["shipped", "file", "admin"]
    file_problem: str
    """Why the policy file is not in force; empty if it is."""


class Decisions(StatusModel):
    """Requests routed, by route and reason."""

    total: NonNegativeInt
    routes: dict[str, NonNegativeInt]
    reasons: dict[str, NonNegativeInt]
    """By the one reason that the response header names."""
    bypass_counts: dict[str, NonNegativeInt]
    """By every reason why a request got no drafts of the lane `text-mtp`; it may have
    several."""


class FleetPrefix(StatusModel):
    """Prefix cache results of all requests."""

    hit: NonNegativeInt
    miss: NonNegativeInt
    none: NonNegativeInt
    """The prompt was too short to be worth a lookup."""
    unknown: NonNegativeInt
    """The engine reports no cached tokens."""
    tokens_by_kind: dict[str, NonNegativeInt]
    """Prompt tokens that workers did not read again: of a `system` prompt, of a `conversation`,
    from `disk`, or `moved` from another worker."""
    not_reused: dict[str, NonNegativeInt]
    """Requests whose worker read earlier turns again, by cause: `changed at message 3`, `evicted`,
    `other Mac`. `too large`: prompts and answers that did not fit into a worker's cache."""


class Status(StatusModel):
    """The complete state at one moment."""

    unix_s: NonNegativeFloat
    """Seconds since the epoch."""
    window: Window
    gateway: GatewayStatus
    store: StoreStatus
    policy: PolicyStatus
    mtp: Mtp
    savings: Savings
    recent: Recent
    last_minute: AnswerCounts
    last_hour: AnswerCounts
    """The last 60 to 61 minutes, less after a start."""
    history: tuple[Point, ...]
    """The window in intervals, oldest first."""
    decisions: Decisions
    outcomes: dict[str, NonNegativeInt]
    errors: dict[str, NonNegativeInt]
    """Error responses, by code."""
    failovers: NonNegativeInt
    """Continuations of requests at another worker."""
    prefix: FleetPrefix
    pools: dict[str, PoolStatus]
    models: dict[str, ModelStatus]
    workers: dict[str, WorkerStatus]


def schema() -> str:
    """Return the published JSON Schema."""
    status = Status.model_json_schema(mode="serialization", schema_generator=UntitledSchema)
    return to_text(status, "Paceline status")


if __name__ == "__main__":
    sys.stdout.write(schema())
