"""A question to a worker beside the data plane: asked again once when the connection fails."""

from __future__ import annotations

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

ATTEMPTS = 2
_BETWEEN_ATTEMPTS_S = 0.05


async def get(client: httpx.AsyncClient, url: str, **headers: str) -> httpx.Response:
    """Return the answer, whatever its status; raise httpx's error of the last attempt.

    The caller limits the time of all attempts together.
    """
    retrying = AsyncRetrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_fixed(_BETWEEN_ATTEMPTS_S),
        retry=retry_if_exception_type(httpx.TransportError),
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            answer = await client.get(url, headers=headers)
    return answer
