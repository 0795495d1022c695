"""`POST /v1/route/explain`: what would become of a body, without running it."""

from __future__ import annotations

from random import Random
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request

from gateway.api.auth import holder_of, with_data_key
from gateway.api.openapi import FOR_CLIENTS, WITH_BODY, failures, ref, takes
from gateway.assembly import Gateway
from gateway.errors import ModelUnknown, PoolsNotAllowed
from gateway.http.downstream import read_small_body
from gateway.protocols import CHAT, COMPLETIONS
from gateway.protocols.openai import parse
from gateway.proxy.client import read_attributes, read_caller
from gateway.routing.select import Candidate, Decision, RoutingRequest, decide
from gateway.routing.view import FleetView
from gateway.status.render import worker_state
from gateway.types import Inspected
from policies.compiler import CallerAttributes
from policies.request.profile import Endpoint


def explanation(gateway: Gateway) -> APIRouter:
    """Hold the route of the explanation."""
    router = APIRouter(dependencies=[Depends(with_data_key(gateway))])

    refusals = failures(*FOR_CLIENTS, *WITH_BODY, ModelUnknown, PoolsNotAllowed)
    bodies = {"anyOf": [ref(endpoint) for endpoint in Endpoint]}

    @router.post("/v1/route/explain", responses=refusals, openapi_extra=takes(bodies))
    async def explain(request: Request) -> dict[str, Any]:
        raw = await read_small_body(
            request.scope,
            request.receive,
            limit_bytes=gateway.settings.body_limit_bytes,
            timeout_s=gateway.settings.body_timeout_s,
        )
        wire_format = COMPLETIONS if "prompt" in parse(raw) else CHAT
        fleet, policy = gateway.fleet.view(), gateway.policy_store.current
        holder = holder_of(request)
        caller = read_caller(request.scope, policy, holder)
        asker = read_attributes(
            request.scope, caller, policy.compiled.headers, gateway.week_clock.minute()
        )
        inspected = wire_format.inspect(raw, policy, fleet)
        holder.check_model(inspected)
        prefix = gateway.prefix_names.prefix_key(inspected, caller, policy.prefix)
        case = RoutingRequest(policy, inspected.profile, asker, caller.pools, prefix)
        # The same dice as the next request, thrown without moving them.
        rng = Random()  # noqa: S311
        rng.setstate(gateway.rng.getstate())
        decision = decide(case, gateway.prefix_index.annotate(fleet, prefix), rng)
        if decision.forbidden:
            raise PoolsNotAllowed
        return _told(inspected, asker, decision) | {"left_out": _left_out(gateway, fleet)}

    return router


def _left_out(gateway: Gateway, fleet: FleetView) -> dict[str, str]:
    """Say of the workers that take no request now why."""
    taking = {worker.worker_id for worker in fleet.workers}
    return {
        member.report.worker_id: worker_state(gateway.fleet, member)
        for member in gateway.fleet.workers()
        if member.report.worker_id not in taking
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    """Tell of one lane; of its score no more digits than mean anything."""
    rounded = {name: round(getattr(candidate, name), 4) for name in ("score_s", "prefill_s")}
    return candidate._asdict() | rounded


def _told(inspected: Inspected, asker: CallerAttributes, decision: Decision) -> dict[str, Any]:
    profile = inspected.profile
    told: dict[str, Any] = {
        "asked_model": inspected.asked_model,
        # How many words to stop at, not which: they are the user's.
        "profile": profile._asdict()
        | {"sampling": profile.sampling._asdict(), "stop": len(profile.stop)},
        "asker": asker._asdict() | {"headers": dict(asker.headers)},
        "bypass": [reason.value for reason in decision.bypass],
        "route": decision.route,
        "servable": bool(decision.candidates),
        "candidates": [_candidate(one) for one in decision.candidates],
    }
    if decision.spill_after_s is not None:
        told["spill_after_s"] = decision.spill_after_s
    if decision.candidates:
        first = decision.candidates[0]
        told |= {"pool": first.pool, "worker": first.worker_id, "reason": first.reason}
    return told
