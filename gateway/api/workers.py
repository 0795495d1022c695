"""`/admin/v1/workers`: workers join by heartbeat and leave by saying so; admins cordon them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.auth import AUTHOR, read_author, with_admin_key, with_join_token
from gateway.api.openapi import FOR_ADMINS, KEPT, WITH_BODY, failures, parameter, ref, takes
from gateway.assembly import Gateway
from gateway.errors import FieldInvalid, KeyRefused, WorkerIdTaken, WorkerUnknown
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S
from gateway.fleet.worker import WorkerState
from gateway.http.downstream import read_small_body
from gateway.status.render import worker_state
from policies.error_messages import message_of
from workers.protocol import WorkerReport

PREFIX = "/admin/v1/workers"
_REPORT_LIMIT_BYTES = 256 * 1024
_LONGEST_DRAIN_S = 600


def joining(gateway: Gateway) -> APIRouter:
    """Hold the routes that workers use."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(with_join_token(gateway))])

    @router.put(
        "/{worker_id}",
        responses=failures(KeyRefused, *WITH_BODY, WorkerIdTaken),
        openapi_extra=takes(ref("WorkerReport")),
    )
    async def beat(worker_id: str, request: Request) -> dict[str, float]:
        # Read here, not by FastAPI: it would read any size, and before it asks for the token.
        raw = await read_small_body(
            request.scope,
            request.receive,
            limit_bytes=_REPORT_LIMIT_BYTES,
            timeout_s=gateway.settings.body_timeout_s,
        )
        report = _read_report(raw)
        if report.worker_id != worker_id:
            raise FieldInvalid("The report is of another worker than the path.", param="worker_id")
        gateway.fleet.heartbeat(report)
        gateway.prefix_index.record_report(report)
        await gateway.counters.store_report(report)
        return {"interval_s": HEARTBEAT_INTERVAL_S}

    @router.delete("/{worker_id}", status_code=204, responses=failures(KeyRefused))
    async def leave(worker_id: str) -> Response:
        gateway.fleet.remove(worker_id)
        return Response(status_code=204)

    @router.get("/{worker_id}/joined", responses=failures(KeyRefused, WorkerUnknown))
    async def has_joined(worker_id: str) -> dict[str, str]:
        """Let who brings a worker learn that it may be used; all else of workers is for admins."""
        for member in gateway.fleet.workers():
            if member.report.worker_id == worker_id:
                return {"worker_id": worker_id, "url": member.report.url}
        raise WorkerUnknown

    return router


def workers(gateway: Gateway) -> APIRouter:
    """Hold the routes in which admins look at workers, and keep new requests from them."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(with_admin_key(gateway))])

    told = failures(*FOR_ADMINS, *KEPT, WorkerUnknown, FieldInvalid)
    signed = {"parameters": [AUTHOR]}
    waiting = parameter("timeout_s", "query", "How long to wait at most.", pattern=r"^\d{1,3}$")

    @router.get("", responses=failures(*FOR_ADMINS))
    async def listing() -> dict[str, Any]:
        members = {member.report.worker_id: member for member in gateway.fleet.workers()}
        names = [*members, *(name for name in gateway.cordons.by_worker if name not in members)]
        return {"workers": [_told(gateway, name, members.get(name)) for name in names]}

    @router.put("/{worker_id}/cordon", responses=told, openapi_extra=signed)
    async def cordon(worker_id: str, request: Request) -> dict[str, Any]:
        await gateway.cordons.add(worker_id, read_author(request))
        return _one(gateway, worker_id)

    @router.delete("/{worker_id}/cordon", status_code=204, responses=told, openapi_extra=signed)
    async def uncordon(worker_id: str, request: Request) -> Response:
        await gateway.cordons.remove(worker_id, read_author(request))
        return Response(status_code=204)

    @router.post(
        "/{worker_id}/drain",
        responses=told,
        openapi_extra={"parameters": [AUTHOR, waiting]},
    )
    async def drain(worker_id: str, request: Request) -> dict[str, Any]:
        timeout_s = _drain_timeout_s(request)
        drained = await gateway.cordons.drain(worker_id, read_author(request), timeout_s)
        return {"drained": drained, **_one(gateway, worker_id)}

    return router


def _one(gateway: Gateway, worker_id: str) -> dict[str, Any]:
    members = (member for member in gateway.fleet.workers() if member.report.worker_id == worker_id)
    return _told(gateway, worker_id, next(members, None))


def _told(gateway: Gateway, worker_id: str, member: WorkerState | None) -> dict[str, Any]:
    """Tell how a worker is; where it is gone there is only that it is cordoned."""
    told: dict[str, Any] = {
        "worker_id": worker_id,
        "state": worker_state(gateway.fleet, member),
        "in_flight": gateway.fleet.local_requests(worker_id),
        "lanes": [],
    }
    if member is not None:
        told |= {
            "url": member.report.url,
            "model": member.report.model,
            "labels": list(member.report.labels),
            "lanes": [
                {
                    "name": lane.name,
                    "slots": lane.slots,
                    "running": lane.running,
                    "waiting": lane.waiting,
                    "in_flight": member.in_flight[lane.name],
                }
                for lane in member.report.lanes
            ],
            "heartbeat_age_s": round(gateway.fleet.heartbeat_age_s(member), 3),
        }
    cordon = gateway.cordons.by_worker.get(worker_id)
    if cordon is not None:
        told |= {"cordoned_since": cordon.since.isoformat(), "cordoned_by": cordon.author}
    return told


def _drain_timeout_s(request: Request) -> float:
    text = request.query_params.get("timeout_s", "30")
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= _LONGEST_DRAIN_S):
        raise FieldInvalid(
            f"'timeout_s' must be whole seconds, at most {_LONGEST_DRAIN_S}.", param="timeout_s"
        )
    return float(text)


def _read_report(raw: bytes) -> WorkerReport:
    try:
        report = WorkerReport.model_validate_json(raw)
    except ValidationError as invalid:
        problem = invalid.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise FieldInvalid(f"{where}: {message_of(problem)}.", param=where or None) from None
    if not _is_base_url(report.url):
        raise FieldInvalid("'url' must be like http://192.168.1.20:9200.", param="url")
    return report


def _is_base_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        has_address = bool(url.hostname) and url.port != 0  # a port that is none raises
    except ValueError:
        return False
    plain = text == f"{url.scheme}://{url.netloc}" and url.username is None
    return has_address and plain and url.scheme in {"http", "https"}
