"""The routes of a worker, wired to one `Worker`."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import SecretStr
from starlette.exceptions import HTTPException

from policies.request.fields import FieldError
from policies.request.profile import Endpoint
from workers.engine.types import EngineError
from workers.server import state
from workers.server.auth import TokenGuard
from workers.server.errors import Refused, UnknownModel, render
from workers.server.metrics import CONTENT_TYPE, exposition
from workers.server.request import read_call, request_id_of
from workers.server.response import Answer
from workers.server.runtime import Worker


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
        return JSONResponse(state.models(worker))

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        if name != worker.engine.card.model:
            raise UnknownModel(name, worker.engine.card.model)
        return JSONResponse(state.model(worker))

    @app.get("/v1/status")
    async def status() -> Response:
        return JSONResponse(state.status(worker))

    @app.get("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    async def readyz() -> Response:
        return state.readiness(worker)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(worker.report()), media_type=CONTENT_TYPE)

    return app
