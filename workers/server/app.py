"""The HTTP API of a worker: its routes, and the check of the join token in front of them."""

from __future__ import annotations

import hashlib
import hmac
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field, SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.protocol import (
    CHECKS,
    MAX_DELETED_SCOPES,
    MAX_PREFIX_NAME_CHARS,
    PREFIX_CACHE_PATH,
    TOKENIZE_PATH,
    mtp_block,
    whole_scope,
)
from paceline.request.fields import FieldError
from paceline.request.profile import GENERATING, Endpoint
from workers.engine.text.long_text import in_turn
from workers.engine.types import EngineError, PoolingCard
from workers.server import pooling, prefix_nodes
from workers.server.errors import (
    ModelUnsuited,
    NotAuthorised,
    RequestError,
    UnknownModel,
    render,
)
from workers.server.metrics import exposition
from workers.server.ports import Json
from workers.server.prefix_nodes import PrefixPeers
from workers.server.request import read_request, request_id_of, while_connected
from workers.server.response import CompletionResponse
from workers.server.runtime import Worker

_OPEN_PATHS = frozenset({"/livez", prefix_nodes.PATH})
"""Public, or with a check of their own."""

router = APIRouter()
"""The routes of every worker."""
_generating = APIRouter()
"""Those of a worker that generates."""


def create_app(
    worker: Worker[Any], token: SecretStr | None, peers: PrefixPeers | None = None
) -> FastAPI:
    """Return the application; without a token, every route is public.

    `peers` are the workers with the same token; without them, no node of the prefix cache travels.
    """
    app = FastAPI(title="Paceline worker", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.worker = worker
    app.state.peers = peers
    app.include_router(router)
    is_pooling = isinstance(worker.engine.card, PoolingCard)
    app.include_router(pooling.router if is_pooling else _generating)
    for error in (RequestError, EngineError, FieldError, HTTPException, Exception):
        app.add_exception_handler(error, render)
    if token:
        app.add_middleware(TokenMiddleware, token=token)
    return app


class TokenMiddleware:
    """ASGI middleware that rejects requests without the token, except to open paths."""

    def __init__(self, app: ASGIApp, token: SecretStr) -> None:
        self._app = app
        self._expected = _digest(f"Bearer {token.get_secret_value()}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 401, or call the application."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            # Of digests: they have one length, and are ASCII whatever bytes the header holds.
            if not hmac.compare_digest(_digest(given), self._expected):
                response = await render(Request(scope), NotAuthorised())
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _digest(credentials: bytes) -> bytes:
    return hashlib.sha256(credentials).digest()


async def _worker(request: Request) -> Worker:
    worker: Worker = request.app.state.worker
    return worker


CachedScope = Annotated[str, Field(min_length=1, max_length=MAX_PREFIX_NAME_CHARS)]
ServedWorker = Annotated[Worker, Depends(_worker)]


@_generating.post("/v1/chat/completions")
async def create_chat_completion(request: Request, worker: ServedWorker) -> Response:
    """Generate a chat completion."""
    return await _response(request, worker, Endpoint.CHAT)


@_generating.post("/v1/completions")
async def create_completion(request: Request, worker: ServedWorker) -> Response:
    """Generate a text completion."""
    return await _response(request, worker, Endpoint.COMPLETIONS)


@_generating.post(TOKENIZE_PATH)
async def count_prompt_tokens(request: Request, worker: ServedWorker) -> dict[str, int]:
    """Count the tokens of a chat's prompt, in the format of vLLM's route without the tokens."""
    request.state.request_id = request_id_of(request)
    engine = worker.engine
    completion = await read_request(request, engine, worker.pictures, Endpoint.CHAT, 0)
    prompt = completion.generations[0].prompt
    counting = in_turn(len(prompt.text), partial(engine.prompts.count, prompt))
    tokens = await while_connected(request.receive, counting)
    return {"count": tokens, "max_model_len": engine.card.context_tokens}


@_generating.post(f"{CHECKS}/chat/completions")
async def check_chat_completion(request: Request, worker: ServedWorker) -> dict[str, int]:
    """Check a request for a chat completion."""
    return await _checked(request, worker, Endpoint.CHAT)


@_generating.post(f"{CHECKS}/completions")
async def check_completion(request: Request, worker: ServedWorker) -> dict[str, int]:
    """Check a request for a text completion."""
    return await _checked(request, worker, Endpoint.COMPLETIONS)


async def _checked(request: Request, worker: Worker, endpoint: Endpoint) -> dict[str, int]:
    response = await _response(request, worker, endpoint)
    return await while_connected(request.receive, response.check())


async def _response(request: Request, worker: Worker, endpoint: Endpoint) -> CompletionResponse:
    request.state.request_id = request_id_of(request)
    peers: PrefixPeers | None = request.app.state.peers
    sources = peers.sources(request.headers) if peers is not None else ()
    completion = await read_request(
        request, worker.engine, worker.pictures, endpoint, int(worker.clock())
    )
    return CompletionResponse(worker, completion, sources)


@_generating.post("/v1/embeddings")
@_generating.post("/v1/rerank")
async def refuse_to_pool(worker: ServedWorker) -> None:
    """Refuse to return vectors or scores."""
    raise ModelUnsuited(worker.engine.card.model, sorted(GENERATING))


@_generating.post(prefix_nodes.PATH)
async def send_prefix_nodes(request: Request, worker: ServedWorker) -> Response:
    """Send nodes of the prefix cache to another worker with the same join token."""
    peers: PrefixPeers | None = request.app.state.peers
    if peers is None:
        raise NotAuthorised
    nonce, query = await prefix_nodes.read_question(request, peers.key)
    return prefix_nodes.NodesResponse(worker, peers.key, nonce, query)


@router.get("/v1/models")
async def list_models(worker: ServedWorker) -> dict[str, Json]:
    """List the one model of the worker."""
    return {"object": "list", "data": [_model(worker)]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, worker: ServedWorker) -> dict[str, Json]:
    """Return the model in OpenAI's format; raise `UnknownModel` for any other name."""
    if name != worker.engine.card.model:
        raise UnknownModel(name, worker.engine.card.model)
    return _model(worker)


def _model(worker: Worker) -> dict[str, Json]:
    return {
        "id": worker.engine.card.model,
        "object": "model",
        "created": int(worker.started_s),
        "owned_by": "paceline",
    }


@router.delete(PREFIX_CACHE_PATH, status_code=204)
async def delete_prefixes(
    worker: ServedWorker,
    scope: Annotated[list[CachedScope], Query(max_length=MAX_DELETED_SCOPES)] = [],  # noqa: B006
) -> None:
    """Delete what the prefix cache has of these isolation scopes; without any, all that it has."""
    scopes: list[str | None] = [*map(whole_scope, scope)] or [None]
    for one in scopes:
        await worker.engine.drop_prefixes(one)


@router.get("/v1/status")
async def read_status(worker: ServedWorker) -> dict[str, Json]:
    """Return the state of the worker: every number comes from the same report."""
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
            "footprint_bytes": report.footprint_bytes,
            "footprint_limit_bytes": report.footprint_limit_bytes,
            "pressure": report.memory_pressure,
            "failed_allocations": report.failed_allocations,
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


@router.get("/livez")
async def check_liveness() -> dict[str, str]:
    """Return 200 while the process runs."""
    return {"status": "alive"}


@router.get("/readyz")
async def check_readiness(worker: ServedWorker) -> Response:
    """Return 200 while the worker accepts requests, else 503 with the reason."""
    if worker.ready:
        return JSONResponse({"status": "ready"})
    reason = "draining" if worker.traffic.draining else "engine_stopped"
    return JSONResponse({"status": reason}, 503, {"retry-after": "1"})


@router.get("/metrics")
async def read_metrics(worker: ServedWorker) -> Response:
    """Return the counters in Prometheus' text format."""
    return Response(exposition(worker.report()), media_type=CONTENT_TYPE_LATEST)
