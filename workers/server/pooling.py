"""The routes of an embedder and of a reranker: OpenAI's embeddings, and rerank as Jina has it."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends
from numpy.typing import NDArray
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.protocol import CHECKS
from paceline.request.parser import read_profile
from paceline.request.pooling import (
    EmbeddingsRequest,
    RerankRequest,
    read_embeddings,
    read_rerank,
)
from paceline.request.profile import Endpoint
from workers.server.errors import BadRequest, ClientLeft, ModelUnsuited, UnknownModel
from workers.server.ports import PoolingEngine
from workers.server.request import read_body, request_id_of, token_limit, while_connected
from workers.server.runtime import Worker

log = logging.getLogger(__name__)

_DECIMALS = 9
"""As many as a 32-bit float of a vector of length 1 has."""
_NUMBERS_LIMIT = {False: 1 << 20, True: 1 << 23}
"""Of one response, as text and as base64: a gateway reads it in one piece."""

router = APIRouter()


async def _worker(request: Request) -> Worker[PoolingEngine]:
    worker: Worker[PoolingEngine] = request.app.state.worker
    return worker


PoolingWorker = Annotated[Worker[PoolingEngine], Depends(_worker)]


@router.post("/v1/embeddings")
async def create_embeddings(request: Request, worker: PoolingWorker) -> Response:
    """Return a vector for each text."""
    asked = await _read_embeddings(request, worker)
    return PoolingResponse(worker, asked, request.state.request_id, token_limit(request))


@router.post("/v1/rerank")
async def rank_documents(request: Request, worker: PoolingWorker) -> Response:
    """Return a score for each document, the best first."""
    asked = await _read_rerank(request, worker)
    return PoolingResponse(worker, asked, request.state.request_id, token_limit(request))


@router.post(f"{CHECKS}/embeddings")
async def check_embeddings(request: Request, worker: PoolingWorker) -> dict[str, int]:
    """Check a request for vectors."""
    return await _check(request, worker, await _read_embeddings(request, worker))


@router.post(f"{CHECKS}/rerank")
async def check_rerank(request: Request, worker: PoolingWorker) -> dict[str, int]:
    """Check a request for scores."""
    return await _check(request, worker, await _read_rerank(request, worker))


async def _check(
    request: Request, worker: Worker[PoolingEngine], asked: EmbeddingsRequest | RerankRequest
) -> dict[str, int]:
    tokens = await while_connected(request.receive, worker.engine.check(asked))
    return {"prompt_tokens": tokens}


@router.post("/v1/chat/completions")
@router.post("/v1/completions")
async def refuse_to_generate(worker: PoolingWorker) -> None:
    """Refuse to generate."""
    raise ModelUnsuited(worker.engine.card.model, worker.engine.card.lanes)


async def _read_embeddings(request: Request, worker: Worker[PoolingEngine]) -> EmbeddingsRequest:
    asked = read_embeddings(await _read(request, worker, Endpoint.EMBEDDINGS))
    dimensions = asked.dimensions or worker.engine.card.dimensions
    limit = _NUMBERS_LIMIT[asked.base64]
    if len(asked.inputs) * dimensions > limit:
        other = "" if asked.base64 else ", or set 'encoding_format' to base64"
        raise BadRequest(
            f"The vectors of one response may have {limit} numbers; send fewer texts{other}.",
            param="input",
        )
    return asked


async def _read_rerank(request: Request, worker: Worker[PoolingEngine]) -> RerankRequest:
    return read_rerank(await _read(request, worker, Endpoint.RERANK))


async def _read(
    request: Request, worker: Worker[PoolingEngine], endpoint: Endpoint
) -> dict[str, Any]:
    """Return a valid body for the model of the worker."""
    request.state.request_id = request_id_of(request)
    card = worker.engine.card
    if endpoint not in card.lanes:
        raise ModelUnsuited(card.model, card.lanes)
    body = await read_body(request)
    profile = read_profile(body, endpoint)
    if profile.model != card.model:
        raise UnknownModel(profile.model, card.model)
    return body


class PoolingResponse(Response):
    """A response that the model computes while it is sent; a disconnect of the client ends that."""

    def __init__(
        self,
        worker: Worker[PoolingEngine],
        asked: EmbeddingsRequest | RerankRequest,
        request_id: str,
        limit: int | None,
    ) -> None:
        super().__init__()
        self._worker = worker
        self._asked = asked
        self._request_id = request_id
        self._token_limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute and send; count as a request in flight until the last byte."""
        with self._worker.traffic.admit():
            try:
                body = await while_connected(receive, self._body())
            except ClientLeft as gone:
                # No error response: the server closes the connection.
                log.info("response.%s request_id=%s", gone.code, self._request_id)
                return
            headers = {"x-request-id": self._request_id}
            response = Response(body, headers=headers, media_type="application/json")
            await response(scope, receive, send)

    async def _body(self) -> bytes:
        asked = self._asked
        numbers, tokens = await self._worker.engine.compute(asked, self._token_limit)
        if isinstance(asked, EmbeddingsRequest):
            return await asyncio.to_thread(_embeddings, asked, numbers, tokens)
        ranking = _ranking(asked, numbers[:, 0].tolist(), tokens)
        return to_json({"id": f"rerank-{self._request_id}"} | ranking)


def _embeddings(asked: EmbeddingsRequest, vectors: NDArray[np.float32], tokens: int) -> bytes:
    """Return the body of a response, in OpenAI's format."""
    if asked.dimensions is not None:
        vectors = _shorten(vectors, asked.dimensions)
    shown: list[Any]
    if asked.base64:
        shown = [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in vectors]
    else:
        shown = np.round(vectors.astype(np.float64), _DECIMALS).tolist()
    return to_json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": one}
                for index, one in enumerate(shown)
            ],
            "model": asked.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _shorten(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Return the beginnings of vectors with length 1 (Matryoshka, arXiv 2205.13147)."""
    short = vectors[:, :dimensions]
    lengths = np.linalg.norm(short, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = short / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled


def _ranking(asked: RerankRequest, scores: list[float], tokens: int) -> dict[str, Any]:
    """Return the body of a response, in Jina's format."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = []
    for index in order[: asked.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if asked.return_documents:
            result["document"] = {"text": asked.documents[index]}
        results.append(result)
    return {
        "object": "list",
        "model": asked.model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
