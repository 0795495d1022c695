"""What a worker says of itself: /livez, /readyz, /v1/models and /v1/status."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from workers.protocol import mtp_block
from workers.server.ports import Json
from workers.server.runtime import Worker


def readiness(worker: Worker) -> Response:
    """Answer 200 while new requests are taken, else 503 and why."""
    if worker.ready:
        return JSONResponse({"status": "ready"})
    reason = "draining" if worker.traffic.draining else "engine_stopped"
    return JSONResponse({"status": reason}, 503, {"retry-after": "1"})


def models(worker: Worker) -> Json:
    """List the one model that is served."""
    return {"object": "list", "data": [model(worker)]}


def model(worker: Worker) -> Json:
    """Describe the served model in OpenAI's shape."""
    return {
        "id": worker.engine.card.model,
        "object": "model",
        "created": int(worker.started_s),
        "owned_by": "paceline",
    }


def status(worker: Worker) -> Json:
    """Render one consistent snapshot: every number in it comes from the same report."""
    report = worker.report()
    card = worker.engine.card
    return {
        "worker_id": report.worker_id,
        "boot_id": report.boot_id,
        "model": report.model,
        "ready": report.ready,
        "uptime_s": round(worker.clock() - worker.started_s, 1),
        "memory": {
            "bytes": report.memory_bytes,
            "snapshot_bytes": report.snapshot_bytes,
            "weights_bytes": card.weights_bytes,
            "parameters": card.parameters,
        },
        "lanes": {
            lane.name: {**lane.model_dump(mode="json"), "mtp": mtp_block((lane,))}
            for lane in report.lanes
        },
        "mtp": mtp_block(report.lanes),
        "report": report.model_dump(mode="json"),
    }
