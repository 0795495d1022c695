"""The admin plane's view of workers: they join by heartbeat, and leave by saying so."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gateway.client import read_small_body
from gateway.fleet import BEAT_S
from gateway.line import Line
from gateway.refusals import FieldInvalid, KeyRefused, WorkerIdTaken, WorkerUnknown
from gateway.routes.documented import FOR_ADMINS, WITH_BODY, failures, ref, takes
from gateway.routes.guards import with_admin_key, with_join_token
from gateway.status import worker_state
from workers.adapters.report import WorkerReport

PREFIX = "/admin/v1/workers"
_REPORT_LIMIT_BYTES = 256 * 1024


def joining(line: Line) -> APIRouter:
    """Hold the routes that workers use."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(with_join_token(line))])

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
            timeout_s=line.settings.body_timeout_s,
        )
        report = _read_report(raw)
        if report.worker_id != worker_id:
            raise FieldInvalid("The report is of another worker than the path.", param="worker_id")
        line.fleet.beat(report)
        line.dispatch.serve_waiting()
        await line.store.keep_report(report)
        return {"beat_s": BEAT_S}

    @router.delete("/{worker_id}", status_code=204, responses=failures(KeyRefused))
    async def leave(worker_id: str) -> Response:
        line.fleet.leave(worker_id)
        return Response(status_code=204)

    @router.get("/{worker_id}/joined", responses=failures(KeyRefused, WorkerUnknown))
    async def has_joined(worker_id: str) -> dict[str, str]:
        """Let who brings a worker learn that it may be used; all else of workers is for admins."""
        for member in line.fleet.members():
            if member.report.worker_id == worker_id:
                return {"worker_id": worker_id, "url": member.report.url}
        raise WorkerUnknown

    return router


def workers(line: Line) -> APIRouter:
    """Hold the route that lists the workers."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(with_admin_key(line))])

    @router.get("", responses=failures(*FOR_ADMINS))
    async def listing() -> dict[str, Any]:
        return {
            "workers": [
                {
                    "worker_id": member.report.worker_id,
                    "url": member.report.url,
                    "model": member.report.model,
                    "labels": list(member.report.labels),
                    "state": worker_state(line.fleet, member),
                    "lanes": [lane.name for lane in member.report.lanes],
                    "last_beat_s_ago": round(line.fleet.age_s(member), 3),
                }
                for member in line.fleet.members()
            ]
        }

    return router


def _read_report(raw: bytes) -> WorkerReport:
    try:
        report = WorkerReport.model_validate_json(raw)
    except ValidationError as invalid:
        problem = invalid.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise FieldInvalid(f"{where}: {problem['msg']}", param=where or None) from None
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
