"""A server that plays the recorded answers of an engine, or those of its published description."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.http_server import Request, ServerConnection
from tests.support.running_gateway import running_server

FOLDER = Path(__file__).parent / "recordings"
_EVENT_END = re.compile(r"(?<=\n\n)")


def recording(name: str) -> dict[str, Any]:
    """Return a recording: its engine, the version or the source, and the exchanges."""
    return json.loads((FOLDER / f"{name}.json").read_text())


class RecordedEngine:
    """Answers each request as the engine has answered one with the same text."""

    def __init__(self, name: str) -> None:
        self.recording = recording(name)
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.requests: list[Request] = []

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        """Send the recorded answer; 599 shows a request without a recording."""
        self.requests.append(request)
        exchange = self._exchange(request)
        if exchange is None:
            await connection.send_head(599, (), length=0)
            return
        headers = tuple(
            (name.encode(), value.encode()) for name, value in exchange["headers"].items()
        )
        body = exchange["body"]
        if "text/event-stream" not in exchange["headers"].get("content-type", ""):
            await connection.send_head(exchange["status"], headers, length=len(body.encode()))
            await connection.send_body(body.encode())
            return
        await connection.send_head(exchange["status"], headers, length=None)
        for piece in filter(None, _EVENT_END.split(body)):
            await connection.send_body(piece.encode())
        await connection.end_body()

    def generated(self) -> list[dict[str, Any]]:
        return [one.json() for one in self.requests if one.path.endswith("completions")]

    def answers(self, request: Request) -> bool:
        return self._exchange(request) is not None

    def _exchange(self, request: Request) -> dict[str, Any] | None:
        asked = _key(request.method, request.path, request.json() if request.body else None)
        for exchange in self.recording["exchanges"]:
            if _key(exchange["method"], exchange["path"], exchange.get("request")) == asked:
                return exchange
        return None


def _key(method: str, path: str, body: dict[str, Any] | None) -> tuple[object, ...]:
    """Return what tells requests of a recording apart."""
    if body is None:
        return method, path
    messages = body.get("messages") or [{"content": body.get("prompt", body.get("model"))}]
    content = messages[-1].get("content")
    text = content if isinstance(content, str) else json.dumps(_texts(content))
    # A long prompt is recorded by its beginning.
    return (
        method,
        path,
        text[:100] if text else "",
        bool(body.get("stream")),
        bool(body.get("tools")),
    )


def _texts(content: object) -> list[str]:
    parts = content if isinstance(content, list) else []
    return [str(part.get("text", part.get("type"))) for part in parts if isinstance(part, dict)]


@contextlib.contextmanager
def recorded_engine(name: str) -> Iterator[RecordedEngine]:
    engine = RecordedEngine(name)
    with running_server(engine, sockets=[engine.socket]):
        yield engine
