"""The routes of a worker, wired to one `Worker`.

The join token, demanded on every route but /livez.

What a worker says of itself: /livez, /readyz, /v1/models and /v1/status.
"""

from __future__ import annotations

import hashlib
import hmac

from fastapi import FastAPI
from pydantic import SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from policies.request.fields import FieldError
from policies.request.profile import Endpoint
from workers.engine.types import EngineError
from workers.protocol import mtp_block
from workers.server.errors import NotAuthorised, Refused, UnknownModel, render
from workers.server.metrics import CONTENT_TYPE, exposition
from workers.server.ports import Json
from workers.server.request import read_call, request_id_of
from workers.server.response import Answer
from workers.server.runtime import Worker

OPEN_PATHS = frozenset({"/livez"})


class TokenGuard:
    """Let a request through when it carries the token, or when the worker has none."""

    def __init__(self, app: ASGIApp, token: SecretStr | None) -> None:
        self._app = app
        self._expected = _digest(f"Bearer {token.get_secret_value()}".encode()) if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse with 401, or pass on unchanged."""
        if scope["type"] != "http" or self._expected is None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        # Digests have one length, and bytes may hold anything: no timing, no TypeError on "é".
        if hmac.compare_digest(_digest(given), self._expected):
            await self._app(scope, receive, send)
            return
        refusal = await render(Request(scope), NotAuthorised())
        await refusal(scope, receive, send)


def _digest(credentials: bytes) -> bytes:
    return hashlib.sha256(credentials).digest()


def create_app(worker: Worker, token: SecretStr | None) -> FastAPI:
    """Build the application; it starts nothing and stops nothing."""
    app = FastAPI(title="Paceline worker", openapi_url=None, docs_url=None, redoc_url=None)
    for error in (Refused, EngineError, FieldError, HTTPException, Exception):
        app.add_exception_handler(error, render)
    app.add_middleware(TokenGuard, token=token)

    async def answer(request: Request, endpoint: Endpoint) -> Response:
        request.state.request_id = request_id_of(request)
        call = await read_call(request, worker.engine, endpoint, int(worker.clock()))
        return Answer(worker, call)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, Endpoint.CHAT)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, Endpoint.COMPLETIONS)

    @app.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse(models(worker))

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        if name != worker.engine.card.model:
            raise UnknownModel(name, worker.engine.card.model)
        return JSONResponse(model(worker))

    @app.get("/v1/status")
    async def read_status() -> Response:
        return JSONResponse(status(worker))

    @app.get("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    async def readyz() -> Response:
        return readiness(worker)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(worker.report()), media_type=CONTENT_TYPE)

    return app


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
            "prefix_cache_bytes": report.prefix_cache_bytes,
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
