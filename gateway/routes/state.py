"""`/v1/status`, `/metrics`, `/livez`, `/readyz`: how the gateway and its fleet are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.client import Receive, Scope, Send
from gateway.errors import Stopping, TooManyViewers
from gateway.feed import Feed, Take
from gateway.gauges import Gauges
from gateway.line import Line
from gateway.metrics import exposition
from gateway.refusals import NotAllowedHere
from gateway.relay import Relay
from gateway.routes.documented import FOR_CLIENTS, Responses, failures
from gateway.routes.guards import holder_of, with_data_key
from gateway.status import render
from gateway.versions import Reason

_SOURCES = {
    Reason.START: "shipped",
    Reason.FILE: "file",
    Reason.EDIT: "admin",
    Reason.ROLLBACK: "admin",
}


def probes(line: Line, relay: Relay) -> APIRouter:
    """Hold what load balancers and Prometheus ask: they have no key, and it tells no secret."""
    router = APIRouter()

    @router.get("/livez", response_class=PlainTextResponse, responses=failures())
    async def livez() -> PlainTextResponse:
        return PlainTextResponse("alive\n")

    not_ready: Responses = {
        503: {"description": "No worker, or stopping.", "content": {"text/plain": {}}}
    }

    # "/health" is where vLLM and SGLang tell the same: load generators ask there first.
    @router.get("/health", response_class=PlainTextResponse, responses=failures() | not_ready)
    @router.get("/readyz", response_class=PlainTextResponse, responses=failures() | not_ready)
    async def readyz() -> PlainTextResponse:
        if relay.leaving:
            return PlainTextResponse("stopping\n", status_code=503)
        if not line.fleet.view().workers:
            return PlainTextResponse("no worker\n", status_code=503)
        why = line.sharing.why_degraded
        return PlainTextResponse(f"ready, degraded: {why}\n" if why else "ready\n")

    @router.get("/metrics", response_class=PlainTextResponse, responses=failures())
    async def metrics() -> Response:
        await line.control.refresh()
        gauges = Gauges(line)
        text = exposition(line.meters, await line.store.reports(), gauges)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return router


class Watching(Response):
    """The state, again and again, for as long as this viewer may and wants to see it."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, allowed: Callable[[], None]) -> None:
        super().__init__()
        self._feed = feed
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write straight to the connection, as answers of the data plane do."""
        await self._feed.show(scope, self._allowed)


def snapshots(line: Line, relay: Relay) -> Take:
    """Return what takes one snapshot of the whole state."""
    began_s = line.clock()

    async def take() -> dict[str, Any]:
        await line.control.refresh()
        policy = line.book.current
        gateway = {
            "ready": not relay.leaving and bool(line.fleet.view().workers),
            "stopping": relay.leaving,
            "uptime_s": round(line.clock() - began_s, 3),
            "requests_in_flight": relay.load.requests,
            "event_loop_lag_s": round(relay.load.lag.worst_s, 4),
        }
        return render(
            gateway=gateway,
            store=line.sharing.told(),
            policy=policy,
            edits=_edits(line),
            fleet=line.fleet,
            in_line={pool: line.dispatch.waiting(pool) for pool in policy.pools},
            in_flight={pool: line.dispatch.running(pool) for pool in policy.pools},
            reports=await line.store.reports(),
            guards={
                "retries_denied": line.upstream.retries.denied,
                "quarantined": len(line.upstream.quarantine),
            },
            prefixes={"known": len(line.prefixes), "untrue": line.prefixes.untrue},
            counts=await line.store.counts(),
            latencies=line.accounting.latencies(),
        )

    return take


def status(line: Line, take: Take, feed: Feed) -> APIRouter:
    """Hold the whole state, once and as a stream of events."""
    guard = with_data_key(line)

    def sees_all(request: Request) -> None:
        if not holder_of(request).sees_all:
            raise NotAllowedHere(
                "This key is for some models or pools alone, so it may not see the whole fleet."
            )

    def still_may(request: Request) -> None:
        guard(request)
        sees_all(request)

    router = APIRouter(dependencies=[Depends(guard), Depends(sees_all)])
    refused = (*FOR_CLIENTS, NotAllowedHere)

    @router.get("/v1/status", responses=failures(*refused))
    async def whole() -> dict[str, Any]:
        return await take()

    @router.get(
        "/v1/status/events",
        response_class=Watching,
        responses=failures(*refused, Stopping, TooManyViewers),
    )
    async def events(request: Request) -> Response:
        return Watching(feed, lambda: still_may(request))

    return router


def _edits(line: Line) -> dict[str, Any]:
    """Tell which version of the policy is in force, and what keeps the file from it."""
    version = line.book.version
    told = {
        "version": version.number,
        "etag": version.etag,
        "source": _SOURCES[version.reason],
    }
    return told | ({"file_problem": line.watch.problem} if line.watch.problem else {})
