"""A relay in front of an engine that records its answers for `make test`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.http_server import Request, ServerConnection
from tests.support.recorded_engine import FOLDER
from workers.demo import CHECKPOINT

_SHOWN_PATH = "/Users/ann/models/demo"
"""In place of the path of the checkpoint on this machine."""
_KEPT_HEADERS = ("content-type", "server")
_LONG_CHARS = 400
"""Of a prompt in a recording: its beginning tells it from others."""


@dataclass
class Recorder:
    """Relays requests to an engine, and keeps the exchanges while `recording`."""

    engine_url: str
    recording: bool = True
    exchanges: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        """Relay one request; an end of the client or of the engine ends both connections."""
        try:
            await self._exchange(connection, request)
        except httpx.TransportError:
            connection.abort()  # as an engine that was killed

    async def _exchange(self, connection: ServerConnection, request: Request) -> None:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name in ("content-type", "authorization", "x-apc-tenant")
        }
        async with (
            httpx.AsyncClient(timeout=600, trust_env=False) as client,
            client.stream(
                request.method,
                self.engine_url + request.path,
                content=request.body or None,
                headers=headers,
            ) as response,
        ):
            kept = {
                name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers
            }
            body = await self._relay(connection, response, kept)
        if self.recording:
            self._keep(request, response.status_code, kept, body)

    async def _relay(
        self, connection: ServerConnection, response: httpx.Response, kept: dict[str, str]
    ) -> bytes:
        names = tuple((name.encode(), value.encode()) for name, value in kept.items())
        body = b""
        if "text/event-stream" not in kept.get("content-type", ""):
            body = await response.aread()
            await connection.send_head(response.status_code, names, length=len(body))
            await connection.send_body(body)
            return body
        await connection.send_head(response.status_code, names, length=None)
        async for piece in response.aiter_raw():
            if connection.client_closed.is_set():
                return body
            body += piece
            if piece:
                await connection.send_body(piece)
        await connection.end_body()
        return body

    def _keep(self, request: Request, status: int, headers: dict[str, str], body: bytes) -> None:
        exchange: dict[str, Any] = {"method": request.method, "path": request.path}
        if request.body:
            exchange["request"] = _shortened(request.json())
        exchange |= {"status": status, "headers": headers, "body": body.decode()}
        if not any(_same(exchange, earlier) for earlier in self.exchanges):
            self.exchanges.append(exchange)

    def write(self, name: str, **about: Any) -> Path:
        """Write what was recorded, without names of this machine."""
        path = FOLDER / f"{name}.json"
        text = json.dumps({**about, "exchanges": self.exchanges}, indent=1, ensure_ascii=False)
        path.write_text(text.replace(str(CHECKPOINT), _SHOWN_PATH) + "\n")
        return path


def _shortened(body: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a request that tell it from others."""
    kept: dict[str, Any] = {
        name: body[name] for name in ("model", "prompt", "stream", "tools") if name in body
    }
    if "messages" in body:
        kept["messages"] = [_short_message(body["messages"][-1])]
    return kept


def _short_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        content = content[:_LONG_CHARS]
    elif isinstance(content, list):
        content = [
            part if part.get("type") == "text" else {"type": part.get("type")} for part in content
        ]
    return {"role": message.get("role"), "content": content}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("method", "path", "request")
    return all(one.get(name) == other.get(name) for name in names)


@dataclass
class FailingRelay(Recorder):
    """Answers nine of ten requests for an answer with 500 at once, and relays the tenth."""

    recording: bool = False
    asked: int = 0

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        if request.method == "POST":
            self.asked += 1
            if self.asked % 10:
                body = b'{"error": {"message": "Internal server error"}}'
                headers = ((b"content-type", b"application/json"),)
                await connection.send_head(500, headers, length=len(body))
                await connection.send_body(body)
                return
        await super().__call__(connection, request)
