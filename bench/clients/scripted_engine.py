"""An engine whose model calls the client's own tools: it reads a file, runs a command, answers.

The demo model is too small to be an agent. This engine stands behind the same gateway as a static
worker, and looks only at the request: which tools there are, and how many results have come back.
A word in the first message of the user asks for something else (`Ask`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

MODEL: Final = "scripted"
NOTE: Final = "note.txt"
"""The file that the model reads, in the client's folder."""
ECHO: Final = "echo from-the-shell"
_READERS: Final = ("read", "read_file", "view", "shell_command", "exec_command", "shell")
_SHELLS: Final = ("bash", "shell_command", "exec_command", "shell", "execute")
_PATHS: Final = ("file_path", "filePath", "path")
_COMMANDS: Final = ("command", "cmd")
_OVERFLOW: Final = {
    "message": "This model's maximum context length is 32768 tokens. However, your messages "
    "resulted in 40000 tokens. Please reduce the length of the messages.",
    "type": "invalid_request_error",
    "param": "messages",
    "code": "context_length_exceeded",
}
_SLOW_S: Final = 60.0
_PIECE_CHARS: Final = 12


class Ask(StrEnum):
    """A word by which a client's prompt asks for an error, or for a stream without an end."""

    BUSY = "PLEASE-BE-BUSY"
    OVERFLOW = "PLEASE-OVERFLOW"
    SLOW = "PLEASE-BE-SLOW"


@contextlib.contextmanager
def running_engine() -> Iterator[str]:
    """Run the engine within the context; yield its URL."""
    server = _Server(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def next_message(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model writes: a call of a tool of the client, or text."""
    messages = body["messages"]
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    results = [str(message["content"]) for message in messages if message["role"] == "tool"]
    steps = [step for step in (_read(tools), _run(tools)) if step is not None]
    if len(results) < len(steps):
        name, arguments = steps[len(results)]
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call{len(results):05}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "assistant", "content": " | ".join(["Done", *results])[:2000]}


def _read(tools: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    for name, function in _found(tools, _READERS):
        properties = _properties(function)
        if path := next((field for field in _PATHS if field in properties), None):
            return name, {path: NOTE}
        if command := _command(properties, f"cat {NOTE}"):
            return name, command
    return None


def _run(tools: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    for name, function in _found(tools, _SHELLS):
        if command := _command(_properties(function), ECHO):
            described = {"description": "echo"} if "description" in _properties(function) else {}
            return name, command | described
    return None


def _found(tools: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for wanted in names:
        for name, function in tools.items():
            if name.lower() == wanted:
                yield name, function


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    properties: Mapping[str, Any] = (function.get("parameters") or {}).get("properties") or {}
    return properties


def _command(properties: Mapping[str, Any], command: str) -> dict[str, Any]:
    for field in _COMMANDS:
        if field in properties:
            listed = properties[field].get("type") == "array"
            return {field: ["bash", "-c", command] if listed else command}
    return {}


def _asked(body: Mapping[str, Any]) -> Ask | None:
    text = json.dumps([message for message in body["messages"] if message["role"] == "user"])
    return next((ask for ask in Ask if ask in text), None)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that the gateway closes, as after a client has left."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write no log."""

    def do_GET(self) -> None:  # the name is the server's
        self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = _asked(body)
        if asked is Ask.BUSY:
            self._send(429, {"error": {"message": "busy"}}, {"retry-after": "1"})
        elif asked is Ask.OVERFLOW:
            self._send(400, {"error": _OVERFLOW})
        elif body.get("stream"):
            with contextlib.suppress(ConnectionError):
                self._stream(next_message(body), slow=asked is Ask.SLOW)
        else:
            message = next_message(body)
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            choice = {"index": 0, "message": message, "finish_reason": reason}
            self._send(200, _frame("chat.completion", [choice], usage=_usage(body)))

    def _stream(self, message: Mapping[str, Any], *, slow: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._event({"role": "assistant", "content": ""})
        reason = "stop"
        for index, call in enumerate(message.get("tool_calls") or ()):
            reason = "tool_calls"
            function = {"name": call["function"]["name"], "arguments": ""}
            self._event({"tool_calls": [{"index": index, **call, "function": function}]})
            for piece in _pieces(call["function"]["arguments"]):
                self._event({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        for piece in _pieces(message.get("content") or ""):
            self._event({"content": piece})
        if slow:
            time.sleep(_SLOW_S)
        self._event({}, reason)
        self._write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, delta: Mapping[str, Any], reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        usage = _usage({}) if reason else None
        frame = _frame("chat.completion.chunk", [choice], usage=usage)
        self._write(b"data: " + json.dumps(frame).encode() + b"\n\n")

    def _write(self, event: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def _send(
        self, status: int, answer: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _frame(kind: str, choices: Sequence[Any], usage: Any) -> dict[str, Any]:
    frame = {"id": "chatcmpl-1", "object": kind, "created": 1, "model": MODEL, "choices": choices}
    return frame | ({"usage": usage} if usage else {})


def _usage(body: Mapping[str, Any]) -> dict[str, int]:
    tokens = len(json.dumps(body)) // 4
    return {"prompt_tokens": tokens, "completion_tokens": 10, "total_tokens": tokens + 10}


def _pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)]
