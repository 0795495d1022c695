"""A gateway over a worker that plays a model by a script, for the loops of agents.

The worker speaks chat alone. It calls the client's own tools if the question says `CALL`, one after
another, and then answers with the end of the last result; it calls the tool that it must call; it
writes slowly without an end if the question says `SLOWLY`, and refuses a prompt beyond its context.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.config.static_workers import StaticWorker
from tests.support.running_gateway import RunningGateway, make_settings, wait_until

MODEL: Final = "scripted"
CONTEXT_CHARS: Final = 150_000
_PIECE_S: Final = 0.05
_ECHO: Final = "echo paceline-$((40+2))"
NOTE: Final = "note.txt"
"""The file that it reads, in the client's folder."""
_CITY: Final = {"city": "Paris"}
_ARGUMENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Read": {"file_path": NOTE},
    "Bash": {"command": _ECHO, "description": "echo"},
    "read": {"filePath": NOTE},
    "bash": {"command": _ECHO, "description": "echo"},
    "exec_command": {"cmd": _ECHO},
    "shell_command": {"command": _ECHO},
    "get_weather": _CITY,
}
_USAGE: Final = {
    "prompt_tokens": 100,
    "completion_tokens": 9,
    "total_tokens": 109,
    "prompt_tokens_details": {"cached_tokens": 60},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


class Scripted(NamedTuple):
    """Where clients find the gateway, with a key, and with one that has one request a minute."""

    url: str
    key: str
    limited_key: str


@contextlib.contextmanager
def running_scripted() -> Iterator[Scripted]:
    """Run the worker and a gateway."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Worker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    worker = StaticWorker(
        id="scripted",
        kind="openai",
        url=f"http://127.0.0.1:{server.server_address[1]}",
        models=(MODEL,),
        pools=("text-mtp", "vlm"),
        slots=16,
    )
    with (
        tempfile.TemporaryDirectory(prefix="paceline-scripted-") as folder,
        RunningGateway(make_settings(Path(folder), workers=(worker,))) as gateway,
    ):
        key = gateway.create_key(name="clients")["secret"]
        limited = gateway.create_key(name="limited", requests_a_minute=1)["secret"]
        wait_until(lambda: gateway.client.get("/readyz").is_success, within_s=30)
        yield Scripted(gateway.url, key, limited)
    server.shutdown()


def _answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message for a chat."""
    messages = body["messages"]
    results = [one["content"] for one in messages if one["role"] == "tool"]
    tools = {tool["function"]["name"] for tool in body.get("tools") or ()}
    calls = [name for name in _ARGUMENTS if name in tools]
    asked = any("CALL" in str(one["content"]) for one in messages if one["role"] == "user")
    choice = body.get("tool_choice")
    if choice == "required":
        return _call(calls[0] if calls else min(tools), len(results))
    if isinstance(choice, dict):
        return _call(choice["function"]["name"], len(results))
    if asked and len(results) < len(calls):
        return _call(calls[len(results)], len(results))
    if results:
        return {"content": f"The tool said: {str(results[-1]).strip()[-40:]}"}
    if (body.get("response_format") or {}).get("type") == "json_schema":
        return {"content": json.dumps(_CITY)}
    return {"content": "Hello from the script."}


def _call(name: str, number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(_ARGUMENTS.get(name, _CITY))}
    call = {"id": f"call_{number + 1}", "type": "function", "index": 0, "function": function}
    return {"content": None, "tool_calls": [call]}


class _Worker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._whole(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        chars = len(json.dumps(body["messages"]))
        if chars > CONTEXT_CHARS:
            text = (
                f"This model's maximum context length is {CONTEXT_CHARS // 4} tokens. However, "
                f"your messages resulted in {chars // 4} tokens."
            )
            error = {"message": text, "type": "invalid_request_error", "param": "messages"}
            self._whole(400, {"error": {**error, "code": "context_length_exceeded"}})
            return
        message = {"role": "assistant", "reasoning_content": "Hm.", **_answer(body)}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        if body.get("stream"):
            self._stream(body, message, reason)
            return
        for call in message.get("tool_calls", ()):
            del call["index"]
        choice = {"index": 0, "message": message, "finish_reason": reason}
        self._whole(200, {**_head(body), "choices": [choice], "usage": _USAGE})

    def _whole(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: Mapping[str, Any], message: Mapping[str, Any], reason: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

        def send(delta: Any, reason: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            self._send({**_head(body), "choices": [choice]})

        try:
            send({"role": "assistant", "content": ""})
            while "SLOWLY" in str(body["messages"][-1]["content"]):
                send({"content": "more "})
                time.sleep(_PIECE_S)
            send({"reasoning_content": message["reasoning_content"]})
            for call in message.get("tool_calls", ()):
                function = call["function"]
                send({"tool_calls": [{**call, "function": {**function, "arguments": ""}}]})
                for piece in function["arguments"].partition(":"):
                    send({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
            for piece in (message["content"] or "").partition(" "):
                send({"content": piece})
            send({}, reason)
            self._send({**_head(body), "choices": [], "usage": _USAGE})
            self._send(None)
        except OSError:
            self.close_connection = True  # the gateway has cancelled the request

    def _send(self, frame: Any) -> None:
        data = b"data: " + (json.dumps(frame).encode() if frame else b"[DONE]") + b"\n\n"
        end = b"" if frame else b"0\r\n\r\n"
        self.wfile.write(b"%x\r\n%b\r\n%b" % (len(data), data, end))


def _head(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": body["model"]}
