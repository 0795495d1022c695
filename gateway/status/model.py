"""What `/v1/status` says, field by field: the typed model behind its JSON Schema.

Nothing in it is ever null or left out: what there is none of is 0, an empty text or an empty list.
The one choice is `mtp`, which is `{"enabled": false}` where no lane drafts.

Counts begin with the fleet and only grow; they are of all gateways that share a Redis. `gateway`,
`recent`, `history` and what is `in_flight` are of the gateway that answers alone.

What was counted and timed, as `/v1/status` tells it at every level: the typed model.

`recent` and `history` are of the window that was asked for (`?window=5m`) and of the requests that
the gateway which answers has sent to workers; drafts there are those that the answers told of.

The JSON Schema of `/v1/status`, from the typed model itself.

`python -m gateway.status.model > docs/status.schema.json` writes it anew; a test says when that
is due.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt
from pydantic.json_schema import GenerateJsonSchema

Share = Annotated[float, Field(ge=0, le=1)]


class Told(BaseModel):
    """A frozen part of the status that has these fields and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Percentiles(Told):
    """How values of the window spread; correct to about an eighth, as buckets are so wide."""

    count: NonNegativeInt
    """Of values; where there is none, all others are 0."""
    p50: NonNegativeFloat
    p95: NonNegativeFloat


class MtpOff(Told):
    """No lane here drafts."""

    enabled: Literal[False]


class MtpOn(Told):
    """What drafting did: `attempted == accepted + rejected + errors` at every moment."""

    enabled: Literal[True]
    requested_draft_tokens: NonNegativeInt
    """k as configured, the largest of the lanes that are there."""
    effective_draft_tokens: NonNegativeInt
    """k at present: 0 where drafting was measured not to pay just now."""
    drafts: NonNegativeInt
    """Verifies of one request's draft."""
    attempted: NonNegativeInt
    """Tokens drafted."""
    accepted: NonNegativeInt
    rejected: NonNegativeInt
    errors: NonNegativeInt
    """Draft tokens that the drafter failed to bring or the verify to judge."""
    acceptance_rate: Share
    """Accepted over judged draft tokens."""
    mean_acceptance_length: Annotated[float, Field(ge=1)]
    """Tokens of a step, the one that it would have brought anyway included."""
    acceptance_rate_per_position: tuple[Share, ...]
    """Share of drafts that were accepted up to this position and further, first one first."""
    bypass_counts: dict[str, NonNegativeInt]
    """Requests that were not drafted for, by reason, as the workers counted them."""


Mtp = MtpOff | MtpOn


class LanePrefix(Told):
    """What workers found of the system prompts that requests share."""

    hits: NonNegativeInt
    misses: NonNegativeInt
    cached_tokens: NonNegativeInt
    """Prompt tokens that were not read again."""


class Saved(Told):
    """What drafting and kept system prompts have saved, as the workers measured it."""

    decode_steps: NonNegativeInt
    """Accepted draft tokens: each is a step of the model that was not taken."""
    decode_s: float
    """Seconds: what these tokens would have taken one by one at the measured cost of a plain step,
    less what the drafted steps took. Below 0 where drafting cost more than it brought."""
    prompt_tokens: NonNegativeInt
    """Of system prompts, not read again."""
    prompt_s: NonNegativeFloat
    """Seconds that reading them would have taken at the measured speed."""


class PrefixResults(Told):
    """Requests by what became of their system prompt."""

    hit: NonNegativeInt
    miss: NonNegativeInt
    none: NonNegativeInt
    """They had none that is worth looking for."""


class Recent(Told):
    """What ended in the window: of the fleet, a pool, a model, a worker or a lane."""

    requests: NonNegativeInt
    """Requests that reached a worker and ended, however they did."""
    failed: NonNegativeInt
    """Of these, those that the worker failed."""
    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    cached_tokens: NonNegativeInt
    tokens_per_s: NonNegativeFloat
    """Tokens of answers that ended, by second of the window: the throughput."""
    first_token_s: Percentiles
    """From the whole body read to the first content; of streams."""
    token_s: Percentiles
    """Seconds a token after the first one; of streams."""
    request_tokens_per_s: Percentiles
    """Tokens a second after the first one, as one client sees it; of streams."""
    wait_s: Percentiles
    """In line for a slot, of those requests that had to wait."""
    answer_s: Percentiles
    """From the first byte of the request to the last of its answer."""
    reasons: dict[str, NonNegativeInt]
    """Why they ran where they ran."""
    prefix: PrefixResults
    mtp: Mtp
    """Drafts within the window, as answers told of them. They tell of no `errors`, which are among
    `rejected`; `bypass_counts` are those of `decisions`, within the window."""


class Window(Told):
    """Which time `recent` and `history` are of."""

    asked_s: NonNegativeFloat
    covered_s: NonNegativeFloat
    """Less where the gateway has not run for so long."""
    longest_s: NonNegativeFloat
    """No longer window is kept."""


class Point(Told):
    """A few seconds of the window."""

    ago_s: NonNegativeFloat
    """How long ago it ended."""
    seconds: NonNegativeFloat
    requests: NonNegativeInt
    tokens_per_s: NonNegativeFloat
    first_token_s: Percentiles
    answer_s: Percentiles
    drafts: NonNegativeInt
    attempted: NonNegativeInt
    accepted: NonNegativeInt
    acceptance_rate: Share


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
    prefix_cache_bytes: NonNegativeInt
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


class GatewayStatus(Told):
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
    gateway: GatewayStatus
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


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> str:
    """Write the schema as it is published."""
    made = Status.model_json_schema(mode="serialization", schema_generator=_Schema)
    return json.dumps({"$schema": _DIALECT, **made, "title": "Paceline status"}, indent=2) + "\n"


class _Schema(GenerateJsonSchema):
    """As pydantic writes it, without titles: they say what the names say."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave titles out."""
        return False


if __name__ == "__main__":
    sys.stdout.write(schema())
