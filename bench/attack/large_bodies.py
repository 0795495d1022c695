"""Large bodies of many shapes, and texts far beyond the context, some from clients that leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from bench.attack.attack import EXPLAIN, Attack
from bench.attack.http_client import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    connection,
    encode,
    prompt_fields,
)
from tests.support.images import data_url, png_header

_MODEL: Final = "demo"
_LARGEST: Final = 31 * 1024 * 1024
_CONTAINERS: Final = 99_000
_USER: Final = {"role": "user", "content": "x" * 20}
_ANSWER: Final = {"role": "assistant", "content": "y"}
_SYSTEM: Final = {"role": "system", "content": "x"}
_TEXT: Final = {"type": "text", "text": "x"}
_CALL: Final = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}


def _chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": _MODEL, "max_tokens": 1, "messages": [*messages], **fields}


def _response(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"model": _MODEL, "max_output_tokens": 1, "input": [*items], "store": False, **fields}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _words(megabytes: int) -> str:
    return "word " * (200_000 * megabytes)


def _pictures(count: int) -> dict[str, Any]:
    url = data_url(png_header(8, 8)) + "A" * (_LARGEST // count // 4 * 4)
    return _chat(_user([{"type": "image_url", "image_url": {"url": url}}, _TEXT] * count))


def _long_arguments() -> dict[str, Any]:
    function = {"name": "f", "arguments": json.dumps({"x": _words(25)})}
    call = {"id": "c", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "c", "content": '"field": ' * 700_000}
    return _chat(_USER, {"role": "assistant", "tool_calls": [call]}, result)


def _long_output() -> dict[str, Any]:
    result = {"type": "function_call_output", "call_id": "c", "output": _words(15)}
    return _response({**_CALL, "arguments": json.dumps({"x": _words(15)})}, result)


def _tools() -> dict[str, Any]:
    tools = [{"type": "function", "name": f"f{number}"} for number in range(_CONTAINERS)]
    return _response(_USER, tools=tools)


def _long_blocks() -> dict[str, Any]:
    texts = ["word " * 20_000] * 150
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": texts}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    return _chat(
        _user([{**_TEXT, "text": text} for text in texts]),
        {"role": "assistant", "content": [call]},
        _user([result]),
    )


SHAPES: Final[Mapping[str, tuple[str, Callable[[], dict[str, Any]]]]] = {
    "short messages": (CHAT, lambda: _chat(*[_USER] * 9_999)),
    "too many messages": (CHAT, lambda: _chat(*[_USER] * 90_000)),
    "messages by turns": (CHAT, lambda: _chat(*[_USER, _ANSWER] * 4_999)),
    "system messages": (CHAT, lambda: _chat(*[_SYSTEM] * 9_998, _USER)),
    "parts of a message": (CHAT, lambda: _chat(_user([_TEXT] * _CONTAINERS))),
    "lists in metadata": (CHAT, lambda: _chat(_USER, metadata={"x": [[]] * _CONTAINERS})),
    "numbers in metadata": (CHAT, lambda: _chat(_USER, metadata={"x": [1.5] * 990_000})),
    "one long text": (CHAT, lambda: _chat(_user("word " * (_LARGEST // 5)))),
    "line feeds": (CHAT, lambda: _chat(_user("\n" * 1_490_000))),
    "text beyond ASCII": (CHAT, lambda: _chat(_user("\u20ac" * 4_000_000))),
    "one large picture": (CHAT, lambda: _pictures(1)),
    "a letter beyond ASCII": (CHAT, lambda: _chat(_user("x" * 8_388_600 + "\u20ac"))),
    "medium texts": (CHAT, lambda: _chat(_user([{**_TEXT, "text": "word " * 20_000}] * 310))),
    "pictures": (CHAT, lambda: _pictures(32)),
    "long arguments": (CHAT, _long_arguments),
    "items": (RESPONSES, lambda: _response(*[_USER] * 9_999)),
    "system items": (RESPONSES, lambda: _response(*[_SYSTEM] * 9_998, _USER)),
    "calls": (RESPONSES, lambda: _response(*[_CALL] * 9_998, _USER)),
    "tools": (RESPONSES, _tools),
    "long output": (RESPONSES, _long_output),
    "blocks": (MESSAGES, lambda: _chat(_user([_TEXT] * _CONTAINERS))),
    "long blocks": (MESSAGES, _long_blocks),
    "users": (MESSAGES, lambda: _chat(*[_USER] * 9_999)),
    "explained": (EXPLAIN, lambda: _chat(*[_USER] * 9_999)),
}
"""Each with the path that it is sent to."""


class LargeBodies(Attack):
    """Each shape in turn, as often as the time allows."""

    name = "large bodies"
    promise = "an answer or an error of the client; no body delays others"
    share = 0.14

    async def run(self) -> None:
        while True:
            for shape, (path, make) in SHAPES.items():
                await self.ask(_encoded(make()), path, given=shape)
                if time.monotonic() > self.deadline_s:
                    return


class HugePrompts(Attack):
    """Texts far beyond the context, in every wire format; every other client leaves."""

    name = "huge prompts"
    promise = "400 context_length_exceeded, and no work for clients that have left"
    share = 0.06
    concurrency = 3

    async def one(self, chance: Random) -> None:
        text = chance.choice(_TEXTS) * (chance.choice((1, 5, 30)) * 1_000_000 // 8)
        path = chance.choice((CHAT, COMPLETIONS, MESSAGES, RESPONSES))
        body = _encoded({"model": _MODEL, **prompt_fields(path, text, 1)})
        given = (path, text[:8], len(body))
        if chance.random() < 0.5:
            # The request may have its line in the log or none.
            self.tally.begin(given)
            async with connection(self.target.gateway_port) as opened:
                await opened.send(encode(body, path=path, key=self.target.key))
                await asyncio.sleep(chance.uniform(0.0, 0.5))
            self.tally.answers["left"] += 1
            return
        answer = await self.ask(body, path, given=given)
        if answer.status == 200 or (answer.status == 400 and answer.code not in _TOO_LONG):
            self.tally.fail(f"{answer.status} {answer.code}", given)


def _encoded(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


_TEXTS: Final = ("word and ", "\n\n\n\n", "€", "a", "<|im_end|>", " 1 2 3 4", "{}[]()")
_TOO_LONG: Final = ("context_length_exceeded", "invalid_request_error", "invalid_json")
