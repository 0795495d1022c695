"""`POST /v1/route/explain`: the routing decision for a body, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from random import Random
from typing import Any, NotRequired

from pydantic_core import to_json
from starlette.requests import Request
from typing_extensions import TypedDict

from gateway.api.auth import CountedBody, CurrentGateway, CurrentHold, CurrentKey, data_router
from gateway.api.openapi import FOR_CLIENTS, WITH_BODY, failures, ref, takes
from gateway.assembly import Gateway
from gateway.engines.base import Told
from gateway.errors import (
    GatewayError,
    LimitReached,
    ModelUnknown,
    ModelUnsuited,
    Overloaded,
    PoolsNotAllowed,
)
from gateway.fleet.health import CHECK_REFUSALS
from gateway.protocols.messages import MessagesFormat, is_messages
from gateway.protocols.openai import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, WireFormat
from gateway.protocols.responses import ResponsesFormat
from gateway.proxy.client import read_caller
from gateway.proxy.handler import inspect, routing_request
from gateway.routing.features import features_of
from gateway.routing.select import Candidate, Decision, decide
from gateway.routing.view import FleetView
from gateway.status.render import worker_state
from gateway.strict_json import Pieces, encode_body, parse
from gateway.types import Inspected
from paceline.request.profile import Endpoint
from paceline.request.wires import WIRE_OF
from policies.compiler import CallerAttributes
from policies.document import PolicyDocument
from policies.evaluate import resolve_model

_EMBEDDINGS_ALONE = {"encoding_format", "dimensions"}
router = data_router("/v1/route/explain")


class Refusal(TypedDict):
    """An error of the request."""

    message: str
    param: str | None
    code: str | None


class Explanation(TypedDict):
    """The routing decision for a body; pool, worker and reason are those of the first candidate."""

    asked_model: str
    profile: dict[str, Any]
    caller: dict[str, Any]
    bypass: list[str]
    route: str | None
    servable: bool
    candidates: list[dict[str, Any]]
    checked: bool
    """Whether a worker has checked the body; only Paceline's workers do."""
    prompt_tokens: NotRequired[int]
    refusal: NotRequired[Refusal]
    """The worker's error if it would refuse the body, which is then not servable."""
    unavailable: dict[str, str]
    """The workers that receive no requests now, each with its state, and the model's workers
    without a requested feature, each with `lacks` and the feature."""
    spill_after_s: NotRequired[float]
    pool: NotRequired[str]
    worker: NotRequired[str]
    reason: NotRequired[str]


@router.post(
    "",
    responses=failures(
        *(*FOR_CLIENTS, *WITH_BODY, ModelUnknown, ModelUnsuited),
        *(PoolsNotAllowed, LimitReached, Overloaded),
    ),
    openapi_extra=takes({"anyOf": [ref(name) for name in (*Endpoint, "messages", "responses")]}),
)
async def explain(
    request: Request,
    raw: CountedBody,
    *,
    gateway: CurrentGateway,
    api_key: CurrentKey,
    hold: CurrentHold,
) -> Explanation:
    """Explain where a request with this body would be routed, without running it."""
    fleet, policy = gateway.fleet.view(), gateway.policy_store.current
    caller = read_caller(request.scope, policy, api_key)
    async with gateway.inspection_thread.turn(hold, raw) as turn:
        body = await turn.run(parse, raw)
        wire_format = await turn.run(_wire_format, gateway, request, body, policy, fleet)
        inspected = await inspect(gateway, wire_format, body, policy, turn, caller=caller)
        api_key.check_model(inspected)
        routed = await turn.run(routing_request, gateway, request.scope, policy, caller, inspected)
        encoded = await turn.run(encode_body, inspected.body, len(raw))
    # The random numbers that the next request will draw.
    rng = Random()  # noqa: S311
    rng.setstate(gateway.rng.getstate())
    decision = decide(
        routed, fleet, gateway.clock(), rng, gateway.prefix_index.cached(routed.prefix)
    )
    if decision.forbidden:
        raise PoolsNotAllowed
    unavailable = _unavailable(gateway, fleet) | _lacking(fleet, inspected)
    explanation = _explanation(inspected, routed.attributes, decision, unavailable)
    if decision.candidates:
        path = WIRE_OF[wire_format.endpoint]
        refused = await _check(gateway, decision.candidates[0], path, encoded, explanation)
        if refused is not None:
            error = wire_format.named(refused)
            explanation["refusal"] = {
                "message": error.message,
                "param": error.param,
                "code": error.code,
            }
    return explanation


def _wire_format(
    gateway: Gateway,
    request: Request,
    body: Mapping[str, Any],
    policy: PolicyDocument,
    fleet: FleetView,
) -> WireFormat:
    """Return the format of a body, by its fields, its headers, or the endpoints of its model."""
    if "query" in body:
        return RERANK
    if "input" in body:
        model = resolve_model(policy, str(body.get("model")), fleet.served_models)
        if _EMBEDDINGS_ALONE & body.keys() or fleet.endpoints_of(model) == {Endpoint.EMBEDDINGS}:
            return EMBEDDINGS
        return ResponsesFormat("resp_", gateway.sealer, gateway.wall)
    if "prompt" in body:
        return COMPLETIONS
    if "anthropic-version" in request.headers or is_messages(body):
        return MessagesFormat(gateway.sealer)
    return CHAT


async def _check(
    gateway: Gateway,
    candidate: Candidate,
    path: str,
    encoded: Pieces,
    explanation: Explanation,
) -> GatewayError | None:
    """Let the worker check the request; return its error if it refuses the request."""
    worker = gateway.fleet.get(candidate.worker_id)
    if worker is None or not worker.backend.sends_reports:
        return None
    headers = worker.backend.headers(Told(candidate.worker_id, candidate.lane))
    response = await gateway.control.check(worker.report, path, encoded, headers)
    status, answer = response or (0, None)
    if not isinstance(answer, dict):
        return None
    if status == HTTPStatus.OK and isinstance(answer.get("prompt_tokens"), int):
        explanation["checked"] = True
        explanation["prompt_tokens"] = answer["prompt_tokens"]
    elif status in CHECK_REFUSALS:
        explanation["checked"], explanation["servable"] = True, False
        return worker.backend.refusal(status, to_json(answer), {})
    return None


def _unavailable(gateway: Gateway, fleet: FleetView) -> dict[str, str]:
    """Map each worker that receives no requests now to its state."""
    return {
        worker.report.worker_id: worker_state(worker)
        for worker in gateway.fleet.workers()
        if worker.report.worker_id not in fleet.workers
    }


def _lacking(fleet: FleetView, inspected: Inspected) -> dict[str, str]:
    """Map each worker of the model to the features of the request that it does not take."""
    profile = inspected.profile
    needs = features_of(profile)
    lacks = {
        worker.worker_id: sorted(worker.by_model[profile.model].lacks & needs)
        for worker in fleet.workers.values()
        if profile.model in worker.by_model
    }
    return {name: f"lacks {', '.join(lacking)}" for name, lacking in lacks.items() if lacking}


def _explanation(
    inspected: Inspected, caller: CallerAttributes, decision: Decision, unavailable: dict[str, str]
) -> Explanation:
    profile = inspected.profile
    explanation: Explanation = {
        "asked_model": inspected.asked_model,
        # The number of stop sequences: the texts belong to the user.
        "profile": profile._asdict()
        | {"sampling": profile.sampling._asdict(), "stop": len(profile.stop)},
        "caller": caller._asdict() | {"headers": dict(caller.headers)},
        "bypass": [reason.value for reason in decision.bypass],
        "route": decision.route,
        "servable": bool(decision.candidates),
        "candidates": [
            one._asdict() | {"score_s": round(one.score_s, 4), "prefill_s": round(one.prefill_s, 4)}
            for one in decision.candidates
        ],
        "checked": False,
        "unavailable": unavailable,
    }
    if decision.spill_after_s is not None:
        explanation["spill_after_s"] = decision.spill_after_s
    if decision.candidates:
        first = decision.candidates[0]
        explanation |= {"pool": first.pool, "worker": first.worker_id, "reason": first.reason}
    return explanation
