"""A gateway over a worker that plays a model by a script, for the loops of agents.

The worker speaks chat alone. It calls the client's own tools if the question says `CALL`, one after
another, and then answers with the end of the last result; it calls the tool that it must call; it
writes slowly without an end if the question says `SLOWLY`, and refuses a prompt beyond its context.
Behind `PLAY:`, lines such as `PLAY Read {"file_path": "a.png"}` name the calls themselves; a client
that asks for a summary of its conversation gets one with the lines that are left.
"""

import asyncio
import contextlib
import json
import re
import secrets
import socket
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.config.static_workers import StaticWorker
from tests.support.http_server import Request, ServerConnection
from tests.support.running_gateway import (
    RunningGateway,
    make_settings,
    running_server,
    wait_until,
)
from tests.support.scripted_worker import DONE, event

MODEL: Final = "scripted"
CONTEXT_TOKENS: Final = 37_500
_TOKEN_CHARS: Final = 4
_PIECE_S: Final = 0.05
_ECHO: Final = "echo paceline-$((40+2))"
NOTE: Final = "note.txt"
"""The file that it reads, in the client's folder."""
_CITY: Final = {"city": "Paris"}
_SCRIPT: Final = "PLAY:"
_PLAY: Final = re.compile(r"^PLAY (\S+) (\{.*\})$", re.MULTILINE)
_SUMMARISE: Final = re.compile("create a detailed summary|CONTEXT CHECKPOINT COMPACTION")
_SUMMARY: Final = "This is the summary of the script."
_PICTURE: Final = re.compile(r"data:image/[^\"]*")
_ARGUMENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Read": {"file_path": NOTE},
    "Bash": {"command": _ECHO, "description": "echo"},
    "read": {"filePath": NOTE},
    "bash": {"command": _ECHO, "description": "echo"},
    "exec_command": {"cmd": _ECHO},
    "shell_command": {"command": _ECHO},
    "get_weather": _CITY,
}
_received: deque[Mapping[str, Any]] = deque(maxlen=100)
"""The last bodies; a client's program reads them at `/received`."""


class Scripted(NamedTuple):
    """Where clients find the gateway, with a key, and with one that has one request a minute."""

    url: str
    worker_url: str
    key: str
    limited_key: str


@contextlib.contextmanager
def running_scripted() -> Iterator[Scripted]:
    listener = socket.create_server(("127.0.0.1", 0))
    worker_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    worker = StaticWorker(
        id="scripted",
        kind="openai",
        url=worker_url,
        models=(MODEL,),
        pools=("text-mtp", "vlm"),
        slots=16,
    )
    with (
        running_server(_serve, sockets=[listener]),
        tempfile.TemporaryDirectory(prefix="paceline-scripted-") as folder,
        RunningGateway(make_settings(Path(folder), workers=(worker,))) as gateway,
    ):
        key = gateway.create_key(name="clients")["secret"]
        limited = gateway.create_key(name="limited", requests_a_minute=1)["secret"]
        wait_until(lambda: gateway.client.get("/readyz").is_success, within_s=30)
        yield Scripted(gateway.url, worker_url, key, limited)


def _answer(body: Mapping[str, Any]) -> dict[str, Any]:
    messages = body["messages"]
    results = [one["content"] for one in messages if one["role"] == "tool"]
    tools = {tool["function"]["name"] for tool in body.get("tools") or ()}
    calls = [name for name in _ARGUMENTS if name in tools]
    asked = any("CALL" in str(one["content"]) for one in messages if one["role"] == "user")
    choice = body.get("tool_choice")
    if choice == "required":
        return _call(calls[0] if calls else min(tools))
    if isinstance(choice, dict):
        return _call(choice["function"]["name"])
    if asked and len(results) < len(calls):
        return _call(calls[len(results)])
    if results:
        return {"content": f"The tool said: {str(results[-1]).strip()[-40:]}"}
    if (body.get("response_format") or {}).get("type") == "json_schema":
        return {"content": json.dumps(_CITY)}
    return {"content": "Hello from the script."}


def _played(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the message for a chat with a script; None for another chat."""
    said = [(at, _text(one)) for at, one in enumerate(messages) if one["role"] == "user"]
    scripts = [(at, text) for at, text in said if _SCRIPT in text]
    if not scripts:
        return None
    at, text = scripts[-1]
    done = sum(one["role"] == "tool" for one in messages[at:])
    left = _PLAY.findall(text.rpartition(_SCRIPT)[2])[done:]
    if _SUMMARISE.search(said[-1][1]):
        lines = [_SUMMARY, _SCRIPT, *(f"PLAY {name} {arguments}" for name, arguments in left)]
        return {"content": "<summary>\n" + "\n".join(lines) + "\n</summary>"}
    return _call(*left[0]) if left else {"content": "The script has ended."}


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    parts = [{"text": content}] if isinstance(content, str) else content
    return "\n".join(part["text"] for part in parts if "text" in part)


def _call(name: str, arguments: str = "") -> dict[str, Any]:
    arguments = arguments or json.dumps(_ARGUMENTS.get(name, _CITY))
    function = {"name": name, "arguments": arguments}
    call_id = f"call_{secrets.token_hex(4)}"
    call = {"id": call_id, "type": "function", "index": 0, "function": function}
    return {"content": None, "tool_calls": [call]}


async def _serve(connection: ServerConnection, request: Request) -> None:
    if request.method == "GET":
        model = {"id": MODEL, "object": "model", "max_model_len": CONTEXT_TOKENS}
        models = {"object": "list", "data": [model]}
        await _send(connection, 200, [*_received] if request.path == "/received" else models)
        return
    body = request.json() | {"id": f"chatcmpl-{secrets.token_hex(8)}"}
    tokens = _tokens(body)
    _received.append({**body, "prompt_tokens": tokens})
    if tokens > CONTEXT_TOKENS:
        text = (
            f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, "
            f"your messages resulted in {tokens} tokens."
        )
        error = {"message": text, "type": "invalid_request_error", "param": "messages"}
        await _send(connection, 400, {"error": {**error, "code": "context_length_exceeded"}})
        return
    message = {
        "role": "assistant",
        "reasoning_content": "Hm.",
        **(_played(body["messages"]) or _answer(body)),
    }
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    if body.get("stream"):
        await _stream(connection, body, message, reason)
        return
    for call in message.get("tool_calls", ()):
        del call["index"]
    choice = {"index": 0, "message": message, "finish_reason": reason}
    answer = {**_head(body), "choices": [choice], "usage": _usage(body)}
    await _send(connection, 200, answer)


async def _send(connection: ServerConnection, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    kind = ((b"content-type", b"application/json"),)
    await connection.send_head(status, kind, length=len(data))
    await connection.send_body(data)


async def _stream(
    connection: ServerConnection, body: Mapping[str, Any], message: Mapping[str, Any], reason: str
) -> None:
    kind = ((b"content-type", b"text/event-stream"),)
    await connection.send_head(200, kind, length=None)

    async def send(delta: Any, reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        await connection.send_body(event({**_head(body), "choices": [choice]}))

    await send({"role": "assistant", "content": ""})
    while "SLOWLY" in str(body["messages"][-1]["content"]):
        await send({"content": "more "})  # until the gateway cancels the request
        await asyncio.sleep(_PIECE_S)
    await send({"reasoning_content": message["reasoning_content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        await send({"tool_calls": [{**call, "function": {**function, "arguments": ""}}]})
        for piece in function["arguments"].partition(":"):
            await send({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
    for piece in (message["content"] or "").partition(" "):
        await send({"content": piece})
    await send({}, reason)
    await connection.send_body(event({**_head(body), "choices": [], "usage": _usage(body)}) + DONE)
    await connection.end_body()


def _tokens(body: Mapping[str, Any]) -> int:
    """Return about how many tokens a prompt has, without its pictures."""
    text = json.dumps([body["messages"], body.get("tools")])
    return len(_PICTURE.sub("", text)) // _TOKEN_CHARS


def _usage(body: Mapping[str, Any]) -> dict[str, Any]:
    prompt = max(100, _tokens(body))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 9,
        "total_tokens": prompt + 9,
        "prompt_tokens_details": {"cached_tokens": 60},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def _head(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**{k: body[k] for k in ("id", "model")}, "object": "chat.completion", "created": 0}
