"""What `/v1/status` says, field by field: the typed model behind its JSON Schema.

Nothing in it is ever null or left out: what there is none of is 0, an empty text or an empty list.
The one choice is `mtp`, which is `{"enabled": false}` where no lane drafts.

Counts begin with the fleet and only grow; they are of all gateways that share a Redis. `gateway`,
`recent`, `history` and what is `in_flight` are of the gateway that answers alone.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from gateway.status_figures import (
    LanePrefix,
    Mtp,
    Percentiles,
    Point,
    PrefixResults,
    Recent,
    Saved,
    Told,
    Window,
)

WorkerState = Literal[
    "ready", "starting", "draining", "cordoned", "ejected", "busy", "probation", "gone"
]


class Lane(Told):
    """One lane of one worker; counts are of all its boots."""

    slots: NonNegativeInt
    """Rows that may run side by side; 0 where the worker is gone."""
    running: NonNegativeInt
    """As the worker tells."""
    waiting: NonNegativeInt
    """As the worker tells."""
    in_flight: NonNegativeInt
    """Sent by this gateway and not yet answered."""
    requests: NonNegativeInt
    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    head_healthy: bool
    """False where the MTP head failed its test or goes on failing: the lane serves plainly."""
    prefix: LanePrefix
    saved: Saved
    mtp: Mtp
    recent: Recent


class Ejection(Told):
    """Why a worker is left alone for what it did; all empty where it is not."""

    for_s: NonNegativeFloat
    why: str
    times: NonNegativeInt
    """In a row, as far as they are not forgiven."""


class Worker(Told):
    """One worker; counts are of all its boots, also those that are over."""

    state: WorkerState
    """`gone`: it said goodbye or fell silent; `probation`: it comes back, step by step."""
    model: str
    labels: tuple[str, ...]
    boots: NonNegativeInt
    boot_id: str
    """Of the present life; empty where it is gone."""
    context_tokens: NonNegativeInt
    memory_bytes: NonNegativeInt
    snapshot_bytes: NonNegativeInt
    """Of these, what is kept of system prompts."""
    last_beat_s_ago: NonNegativeFloat
    ejected: Ejection
    busy_for_s: NonNegativeFloat
    """Left alone so long because it asked for that."""
    lanes: dict[str, Lane]
    prefix: LanePrefix
    saved: Saved
    mtp: Mtp
    recent: Recent


class Pool(Told):
    """One pool of the policy; counts are of its lanes on all workers."""

    lanes: tuple[str, ...]
    workers: tuple[str, ...]
    """Those that take requests now."""
    slots: NonNegativeInt
    running: NonNegativeInt
    waiting: NonNegativeInt
    """In line here and, where other gateways send too, at the workers."""
    in_flight: NonNegativeInt
    """Sent by this gateway and not yet answered."""
    requests: NonNegativeInt
    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    decisions: dict[str, NonNegativeInt]
    """Requests that were sent here, by reason."""
    prefix: LanePrefix
    saved: Saved
    mtp: Mtp
    recent: Recent


class Tokens(Told):
    """Tokens as gateways passed them on."""

    prompt: NonNegativeInt
    completion: NonNegativeInt
    cached: NonNegativeInt
    """Of the prompt tokens."""


class Model(Told):
    """One model, on whichever workers."""

    workers: tuple[str, ...]
    tokens: Tokens
    prefix: LanePrefix
    saved: Saved
    mtp: Mtp
    recent: Recent


class Gateway(Told):
    """The gateway that answers."""

    ready: bool
    stopping: bool
    uptime_s: NonNegativeFloat
    requests_in_flight: NonNegativeInt
    event_loop_lag_s: NonNegativeFloat
    """The longest delay of the last ten seconds."""
    added_s: Percentiles
    """From the whole body read to the request handed to a worker, less the wait for a slot."""


class Store(Told):
    """Where state is kept, and how that is."""

    kind: Literal["memory", "redis"]
    state: Literal["ok", "degraded"]
    why: str
    """What is wrong; empty where nothing is."""
    gateways: NonNegativeInt
    """Those that share it now."""


class Policy(Told):
    """The version of the policy that is in force."""

    version: NonNegativeInt
    etag: str
    source: Literal["shipped", "file", "admin"]
    file_problem: str
    """What keeps the policy file from being in force; empty where nothing does."""


class Decisions(Told):
    """Where requests were sent, and why."""

    total: NonNegativeInt
    pools: dict[str, NonNegativeInt]
    routes: dict[str, NonNegativeInt]
    reasons: dict[str, NonNegativeInt]
    """The one reason that the answer's header named."""
    bypass_counts: dict[str, NonNegativeInt]
    """Every reason that kept a request out of the speculative lane; one may have several."""


class FleetPrefix(PrefixResults):
    """System prompts: what became of requests, and what is known of holders."""

    known: NonNegativeInt
    """Prompts of which this gateway knows who holds them."""
    untrue: NonNegativeInt
    """Times that a worker turned out not to hold what was expected of it."""


class Status(Told):
    """The whole state at one moment."""

    unix_s: NonNegativeFloat
    """The time of the day."""
    window: Window
    gateway: Gateway
    store: Store
    policy: Policy
    mtp: Mtp
    saved: Saved
    recent: Recent
    history: tuple[Point, ...]
    """The window in steps, oldest first."""
    decisions: Decisions
    outcomes: dict[str, NonNegativeInt]
    errors: dict[str, NonNegativeInt]
    """By the code that clients got."""
    retries: NonNegativeInt
    retries_denied: NonNegativeInt
    """By this gateway, since too many were on a further attempt."""
    quarantined: NonNegativeInt
    """Request bodies that this gateway sends no more, because two workers were lost over each."""
    prefix: FleetPrefix
    pools: dict[str, Pool]
    models: dict[str, Model]
    workers: dict[str, Worker]
