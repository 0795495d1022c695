"""The HTTP API of a worker: its routes, and the check of the join token in front of them."""

from __future__ import annotations

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
from workers.server import prefix_nodes
from workers.server.engines import Json
from workers.server.errors import (
    ModelUnsuited,
    NotAuthorised,
    RequestError,
    UnknownModel,
    render,
)
from workers.server.metrics import exposition
from workers.server.pooling import PoolingResponse, read_pooling
from workers.server.prefix_nodes import PrefixPeers
from workers.server.request import read_request, request_id_of, token_limit, while_connected
from workers.server.response import CompletionResponse
from workers.server.runtime import Worker

_OPEN_PATHS = frozenset({"/livez", prefix_nodes.PATH})
"""Public, or with a check of their own."""

_ENDPOINTS = {
    "/chat/completions": Endpoint.CHAT,
    "/completions": Endpoint.COMPLETIONS,
    "/embeddings": Endpoint.EMBEDDINGS,
    "/rerank": Endpoint.RERANK,
}
router = APIRouter()
"""The routes of every worker."""
_generating, _pooling = APIRouter(), APIRouter()
"""Those of a worker that generates, and of an embedder or a reranker."""


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
    app.include_router(_pooling if is_pooling else _generating)
    for error in (RequestError, EngineError, FieldError, HTTPException, Exception):
        app.add_exception_handler(error, render)
    if token:
        app.add_middleware(TokenMiddleware, token=token)
    return app


class TokenMiddleware:
    """ASGI middleware that rejects requests without the token, except to open paths."""

    def __init__(self, app: ASGIApp, token: SecretStr) -> None:
        self._app = app
        self._expected = f"Bearer {token.get_secret_value()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 401, or call the application."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                response = await render(Request(scope), NotAuthorised())
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _endpoint_of(request: Request) -> Endpoint:
    """Return the endpoint of a route of the data plane, or of its route for checks."""
    return _ENDPOINTS[request.url.path.removeprefix(CHECKS).removeprefix("/v1")]


def _served_worker(request: Request) -> Worker[Any]:
    worker: Worker[Any] = request.app.state.worker
    return worker


CachedScope = Annotated[str, Field(min_length=1, max_length=MAX_PREFIX_NAME_CHARS)]
ServedWorker = Annotated[Worker[Any], Depends(_served_worker)]


@_generating.post("/v1/chat/completions")
@_generating.post("/v1/completions")
async def create_completion(request: Request, worker: ServedWorker) -> Response:
    """Generate a chat or a text completion."""
    return await _response(request, worker)


@_generating.post(f"{CHECKS}/chat/completions")
@_generating.post(f"{CHECKS}/completions")
async def check_completion(request: Request, worker: ServedWorker) -> dict[str, int]:
    """Check a request for a completion."""
    response = await _response(request, worker)
    return await while_connected(request.receive, response.check())


async def _response(request: Request, worker: Worker) -> CompletionResponse:
    request.state.request_id = request_id_of(request)
    peers: PrefixPeers | None = request.app.state.peers
    sources = peers.sources(request.headers) if peers is not None else ()
    now_s = int(worker.clock())
    completion = await read_request(
        request, worker.engine, worker.pictures, _endpoint_of(request), now_s
    )
    return CompletionResponse(worker, completion, sources)


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


@_generating.post("/v1/embeddings")
@_generating.post("/v1/rerank")
@_pooling.post("/v1/chat/completions")
@_pooling.post("/v1/completions")
async def refuse_endpoint(worker: ServedWorker) -> None:
    """Refuse an endpoint that the model does not serve."""
    card = worker.engine.card
    served = card.lanes if isinstance(card, PoolingCard) else sorted(GENERATING)
    raise ModelUnsuited(card.model, served)


@_pooling.post("/v1/embeddings")
@_pooling.post("/v1/rerank")
async def create_pooling(request: Request, worker: ServedWorker) -> Response:
    """Return a vector for each text, or a score for each document, the best first."""
    asked = await read_pooling(request, _endpoint_of(request), worker.engine.card)
    return PoolingResponse(worker, asked, request.state.request_id, token_limit(request))


@_pooling.post(f"{CHECKS}/embeddings")
@_pooling.post(f"{CHECKS}/rerank")
async def check_pooling(request: Request, worker: ServedWorker) -> dict[str, int]:
    """Check a request for vectors or scores."""
    asked = await read_pooling(request, _endpoint_of(request), worker.engine.card)
    tokens = await while_connected(request.receive, worker.engine.check(asked))
    return {"prompt_tokens": tokens}


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
    name = worker.engine.card.model
    return {"object": "list", "data": [await retrieve_model(name, worker)]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, worker: ServedWorker) -> dict[str, Json]:
    """Return the model in OpenAI's format; raise `UnknownModel` for any other name."""
    if name != worker.engine.card.model:
        raise UnknownModel(name, worker.engine.card.model)
    created_s = int(worker.started_s)
    return {"id": name, "object": "model", "created": created_s, "owned_by": "paceline"}


@router.delete(PREFIX_CACHE_PATH, status_code=204)
async def delete_prefixes(
    worker: ServedWorker,
    scope: Annotated[list[CachedScope], Query(max_length=MAX_DELETED_SCOPES)] = [],  # noqa: B006
) -> None:
    """Delete the nodes of these isolation scopes from the prefix cache; without any, all nodes."""
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
