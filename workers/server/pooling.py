"""Requests for vectors and scores, and their responses: OpenAI's embeddings, and Jina's rerank."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json
from starlette.requests import Request
from starlette.types import Send

from paceline.request.parser import read_profile
from paceline.request.pooling import (
    EmbeddingsRequest,
    RerankRequest,
    read_embeddings,
    read_rerank,
)
from paceline.request.profile import Endpoint
from workers.engine.types import PoolingCard
from workers.server.errors import BadRequest, ModelUnsuited, UnknownModel
from workers.server.request import read_body, request_id_of
from workers.server.response import WorkResponse
from workers.server.runtime import Worker

if TYPE_CHECKING:  # it imports MLX
    from workers.engine.pooling import PoolingEngine

_DECIMALS = 9
"""As many as a 32-bit float of a vector of length 1 has."""
_NUMBERS_LIMIT = {False: 1 << 20, True: 1 << 23}
"""Of one response, as text and as base64: a gateway reads it in one piece."""


async def read_pooling(
    request: Request, endpoint: Endpoint, card: PoolingCard
) -> EmbeddingsRequest | RerankRequest:
    """Read and check a request for the model of a worker; raise `RequestError` or `FieldError`."""
    request.state.request_id = request_id_of(request)
    if endpoint not in card.lanes:
        raise ModelUnsuited(card.model, card.lanes)
    body = await read_body(request)
    profile = read_profile(body, endpoint)
    if profile.model != card.model:
        raise UnknownModel(profile.model, card.model)
    if endpoint is Endpoint.RERANK:
        return read_rerank(body)
    asked = read_embeddings(body)
    limit = _NUMBERS_LIMIT[asked.base64]
    if len(asked.inputs) * (asked.dimensions or card.dimensions) > limit:
        other = "" if asked.base64 else ", or set 'encoding_format' to base64"
        raise BadRequest(
            f"The vectors of one response may have {limit} numbers; send fewer texts{other}.",
            param="input",
        )
    return asked


class PoolingResponse(WorkResponse):
    """A response of vectors or scores."""

    def __init__(
        self,
        worker: Worker[PoolingEngine],
        asked: EmbeddingsRequest | RerankRequest,
        request_id: str,
        limit: int | None,
    ) -> None:
        super().__init__(worker, request_id)
        self._asked = asked
        self._token_limit = limit

    async def _respond(self, send: Send) -> bytes:  # noqa: ARG002
        asked = self._asked
        numbers, tokens = await self._worker.engine.compute(asked, self._token_limit)
        if isinstance(asked, EmbeddingsRequest):
            return await asyncio.to_thread(_embeddings, asked, numbers, tokens)
        ranking = _ranking(asked, numbers[:, 0].tolist(), tokens)
        return to_json({"id": f"rerank-{self._request_id}"} | ranking)


def _embeddings(asked: EmbeddingsRequest, vectors: NDArray[np.float32], tokens: int) -> bytes:
    """Return the body of a response, in OpenAI's format."""
    if asked.dimensions is not None:  # the beginnings, of length 1 (Matryoshka, arXiv 2205.13147)
        short = vectors[:, : asked.dimensions]
        lengths = np.linalg.norm(short, axis=1, keepdims=True)
        vectors = short / np.maximum(lengths, np.finfo(np.float32).tiny)
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
