"""The admin plane's view of workers: they join by heartbeat, and leave by saying so."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from gateway.errors import FieldInvalid
from gateway.fleet import BEAT_S
from gateway.line import Line
from gateway.routes.guards import with_admin_key, with_join_token
from gateway.status import worker_state
from workers.adapters.report import WorkerReport


def workers(line: Line) -> APIRouter:
    """Hold the routes under /admin/v1/workers."""
    router = APIRouter(prefix="/admin/v1/workers")
    joined = [Depends(with_join_token(line))]

    @router.put("/{worker_id}", dependencies=joined)
    async def beat(worker_id: str, report: WorkerReport) -> dict[str, float]:
        if report.worker_id != worker_id:
            raise FieldInvalid("The report is of another worker than the path.", param="worker_id")
        if not report.url.startswith(("http://", "https://")):
            raise FieldInvalid("'url' must be an http address.", param="url")
        line.fleet.beat(report)
        await line.store.keep_report(report)
        return {"beat_s": BEAT_S}

    @router.delete("/{worker_id}", dependencies=joined)
    async def leave(worker_id: str) -> Response:
        line.fleet.leave(worker_id)
        return Response(status_code=204)

    @router.get("", dependencies=[Depends(with_admin_key(line))])
    async def listing() -> dict[str, Any]:
        return {
            "workers": [
                {
                    "worker_id": member.report.worker_id,
                    "url": member.report.url,
                    "model": member.report.model,
                    "state": worker_state(member),
                    "lanes": [lane.name for lane in member.report.lanes],
                    "last_beat_s_ago": round(line.fleet.age_s(member), 3),
                }
                for member in line.fleet.members()
            ]
        }

    return router
