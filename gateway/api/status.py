"""`/v1/status` and its events, `/metrics`, and health checks."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.api.auth import CurrentGateway, CurrentKey, check_data_key, data_router, part
from gateway.api.gauges import Gauges
from gateway.api.openapi import FOR_CLIENTS, Responses, failures
from gateway.assembly import Gateway
from gateway.config.policy_versions import Reason
from gateway.errors import FieldInvalid, NotAllowedHere, Overloaded, ShuttingDown, TooManyViewers
from gateway.periodic import SharedRuns
from gateway.proxy.handler import ProxyHandler
from gateway.status.events import StatusFeed
from gateway.status.model import GatewayStatus, PolicyStatus, Status, StoreStatus
from gateway.status.render import (
    DEFAULT_WINDOW,
    FleetRenderer,
    WindowStats,
    unready_workers,
    window_s,
)
from gateway.telemetry.prometheus import GatewayMetrics, WorkerMetrics, exposition

READERS_LIMIT = 64
"""Of requests for `/metrics`, and for `/v1/status`, that are answered at a time."""
probes = APIRouter()
"""For load balancers and Prometheus, which need no key."""
router = data_router()
_NOT_READY: Responses = {
    503: {"description": "No ready worker, or stopping.", "content": {"text/plain": {}}}
}
_SOURCES: Mapping[Reason, Literal["shipped", "file", "admin"]] = {
    Reason.START: "shipped",
    Reason.FILE: "file",
    Reason.EDIT: "admin",
    Reason.ROLLBACK: "admin",
}


class StatusService:
    """The state of one gateway."""

    def __init__(self, gateway: Gateway, proxy: ProxyHandler) -> None:
        self._gateway = gateway
        self._proxy = proxy
        self.feed = StatusFeed(functools.partial(self.take, window_s(DEFAULT_WINDOW)))
        self._readers = Counter[str]()
        self.metrics = SharedRuns(self._render_metrics)
        """Returns the metrics, rendered once for all who call at a time."""

    @contextlib.contextmanager
    def admit(self, page: str) -> Iterator[None]:
        """Count a reader of a page within the context; raise `Overloaded` if there are too many."""
        if self._readers[page] >= READERS_LIMIT:
            raise Overloaded
        self._readers[page] += 1
        try:
            yield
        finally:
            self._readers[page] -= 1

    async def take(self, length_s: float) -> Status:
        """Take a snapshot with statistics of a window in seconds."""
        gateway, proxy = self._gateway, self._proxy
        await gateway.control.refresh_all()
        reports, counts = await gateway.counters.reports(), await gateway.counters.counts()
        # No await from here on, so that all values are of one moment.
        window = WindowStats(gateway.stats_history, length_s)
        unix_s = gateway.wall()
        fleet = FleetRenderer(
            unix_s=unix_s,
            policy=gateway.policy_store.current,
            fleet=gateway.fleet,
            queued=gateway.scheduler.waiting,
            in_flight=gateway.scheduler.running,
            reports=reports,
            counts=counts,
            window=window,
        )
        lame_duck, version = gateway.lame_duck, gateway.policy_store.version
        return Status(
            unix_s=round(unix_s, 3),
            gateway=GatewayStatus(
                ready=not lame_duck and bool(gateway.fleet.view().workers),
                stopping=lame_duck,
                uptime_s=round(gateway.clock() - gateway.began_s, 3),
                requests_in_flight=proxy.load.requests,
                added_latency_s=window.added_latency_s,
            ),
            store=StoreStatus(**gateway.cluster_sync.status()),
            policy=PolicyStatus(
                version=version.number,
                source=_SOURCES[version.reason],
                file_problem=gateway.policy_file.problem,
            ),
            **fleet.render(),
        )

    async def _render_metrics(self) -> bytes:
        gateway = self._gateway
        await gateway.control.refresh_all()
        reports, counts = await gateway.counters.reports(), await gateway.counters.counts()
        return exposition(
            GatewayMetrics(gateway.accounting),
            WorkerMetrics(reports, counts),
            Gauges(gateway, self._proxy),
        )


CurrentService = Annotated[StatusService, part("status")]


@probes.get("/livez", response_class=PlainTextResponse, responses=failures())
async def livez() -> PlainTextResponse:
    """Report that the process runs."""
    return PlainTextResponse("alive\n")


# "/health" as in vLLM and SGLang: load generators call it first.
@probes.get("/health", response_class=PlainTextResponse, responses=failures() | _NOT_READY)
@probes.get("/readyz", response_class=PlainTextResponse, responses=failures() | _NOT_READY)
async def readyz(gateway: CurrentGateway) -> PlainTextResponse:
    """Report whether a worker can answer requests."""
    if gateway.lame_duck:
        return PlainTextResponse("stopping\n", status_code=503)
    ready = bool(gateway.fleet.view().workers)
    state = "ready" if ready else unready_workers(gateway.fleet)
    refused = "The policy file is not active." if gateway.policy_file.rejection else ""
    why = f"{gateway.cluster_sync.problems} {refused}".strip()
    degraded = f", degraded: {why}" if why else ""
    return PlainTextResponse(f"{state}{degraded}\n", status_code=200 if ready else 503)


@probes.get("/metrics", response_class=PlainTextResponse, responses=failures(Overloaded))
async def metrics(service: CurrentService) -> Response:
    """Show the metrics in the format of Prometheus."""
    with service.admit("metrics"):
        text = await service.metrics()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def _check_unrestricted(api_key: CurrentKey) -> None:
    if api_key.caller.pools is not None or api_key.models is not None:
        raise NotAllowedHere(
            "This API key is restricted to some models or pools, so it cannot read the status."
        )


@router.get(
    "/v1/status",
    response_model=Status,
    dependencies=[Depends(_check_unrestricted)],
    responses=failures(*FOR_CLIENTS, NotAllowedHere, FieldInvalid, Overloaded),
)
async def whole(
    request: Request, service: CurrentService, window: str = DEFAULT_WINDOW
) -> Response:
    """Show the state of the gateway, its workers, pools and models."""
    given = [name for name, _ in request.query_params.multi_items()]
    if given not in ([], ["window"]):
        raise FieldInvalid("The only query parameter is 'window', at most once.", param="window")
    length_s = window_s(window)
    with service.admit("status"):
        state = await service.take(length_s)
        return Response(state.model_dump_json(), media_type="application/json")


class StatusStream(Response):
    """The status as a stream of events, for as long as the key allows it."""

    media_type = "text/event-stream"

    def __init__(self, feed: StatusFeed, allowed: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._feed = feed
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Write events directly to the connection, as the proxy does."""
        await self._feed.stream_to(scope, self._allowed)


@router.get(
    "/v1/status/events",
    dependencies=[Depends(_check_unrestricted)],
    status_code=200,
    response_class=StatusStream,
    responses=failures(*FOR_CLIENTS, NotAllowedHere, ShuttingDown, TooManyViewers),
)
async def events(request: Request, gateway: CurrentGateway, service: CurrentService) -> Response:
    """Stream the state, once a second."""

    async def check_again() -> None:
        check_data_key(request, gateway)
        await _check_unrestricted(request.state.api_key)

    return StatusStream(service.feed, check_again)
