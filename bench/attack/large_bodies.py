"""Large bodies of many shapes, and texts far beyond the context, some from clients that leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from bench.attack.attack import Answer, Tally, Target, play
from bench.attack.formats import COMPLETIONS, MESSAGES, RESPONSES
from bench.attack.http_client import CHAT, chat, connection, encode, send
from tests.support.images import data_url, png_header

_MODEL: Final = "demo"
_LARGEST: Final = 31 * 1024 * 1024
_CONTAINERS: Final = 99_000
EXPLAIN: Final = "/v1/route/explain"

_USER: Final = {"role": "user", "content": "x" * 20}
_ANSWER: Final = {"role": "assistant", "content": "y"}
_SYSTEM: Final = {"role": "system", "content": "x"}
_TEXT: Final = {"type": "text", "text": "x"}
_CALL: Final = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}


def _chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": _MODEL, "max_tokens": 1, "messages": [*messages], **fields}


def _response(*items: Any) -> dict[str, Any]:
    return {"model": _MODEL, "max_output_tokens": 1, "input": [*items], "store": False}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


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
    "one large picture": (
        CHAT,
        lambda: _chat(
            _user([{"type": "image_url", "image_url": {"url": _picture(_LARGEST)}}, _TEXT])
        ),
    ),
    "a letter beyond ASCII": (CHAT, lambda: _chat(_user("x" * 8_388_600 + "\u20ac"))),
    "medium texts": (CHAT, lambda: _chat(_user([{**_TEXT, "text": "word " * 20_000}] * 310))),
    "pictures": (
        CHAT,
        lambda: _chat(
            _user([{"type": "image_url", "image_url": {"url": _picture(_LARGEST // 32)}}] * 32)
        ),
    ),
    "long arguments": (
        CHAT,
        lambda: _chat(
            _USER,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "f", "arguments": f'{{"x":"{"word " * 5_000_000}"}}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": '"field": ' * 700_000},
        ),
    ),
    "items": (RESPONSES, lambda: _response(*[_USER] * 9_999)),
    "system items": (RESPONSES, lambda: _response(*[_SYSTEM] * 9_998, _USER)),
    "calls": (RESPONSES, lambda: _response(*[_CALL] * 9_998, _USER)),
    "long output": (
        RESPONSES,
        lambda: _response(
            {**_CALL, "arguments": json.dumps({"x": "word " * 3_000_000})},
            {"type": "function_call_output", "call_id": "c", "output": "word " * 3_000_000},
        ),
    ),
    "blocks": (MESSAGES, lambda: _chat(_user([_TEXT] * _CONTAINERS))),
    "long blocks": (
        MESSAGES,
        lambda: _chat(
            _user([{**_TEXT, "text": "word " * 20_000}] * 150),
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "c",
                        "name": "f",
                        "input": {"x": ["word " * 20_000] * 150},
                    }
                ],
            },
            _user([{"type": "tool_result", "tool_use_id": "c", "content": "x"}]),
        ),
    ),
    "users": (MESSAGES, lambda: _chat(*[_USER] * 9_999)),
    "explained": (EXPLAIN, lambda: _chat(*[_USER] * 9_999)),
}
"""Each with the path that it is sent to."""


class LargeBodies:
    """Each shape in turn, as often as the time allows."""

    name = "large bodies"
    promise = "an answer or an error of the client; no body delays others"
    share = 0.14

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        while True:
            for shape, (path, make) in SHAPES.items():
                body = _encoded(make())
                tally.begin(f"{shape}, {len(body) / 1e6:.1f} MB")
                tally.answer(await _ask(target, path, body), shape)
                if time.monotonic() > deadline_s:
                    return


class HugePrompts:
    """Texts far beyond the context, in every wire format; every other client leaves."""

    name = "huge prompts"
    promise = "400 context_length_exceeded, and no work for clients that have left"
    share = 0.06

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        async def one(chance: Random) -> None:
            text = chance.choice(_TEXTS) * (chance.choice((1, 5, 30)) * 1_000_000 // 8)
            path, fields = chance.choice(tuple(_PROMPTS.items()))
            body = _encoded({"model": _MODEL, **fields(text)})
            tally.begin(f"{path}, {len(body) / 1e6:.1f} MB, {text[:8]!r}")
            if chance.random() < 0.5:
                await self._leave(target, path, body, chance)
                tally.answers["left"] += 1
                return
            answer = await chat(target, "huge", body, path=path)
            tally.answer(answer, (path, text[:8]))
            if answer.status == 200 or (answer.status == 400 and answer.code not in _TOO_LONG):
                tally.fail(f"{answer.status} {answer.code}", (path, text[:8], len(body)))

        await play(one, rng, deadline_s, concurrency=3)

    async def _leave(self, target: Target, path: str, body: bytes, chance: Random) -> None:
        """Send a body and leave soon; the request may have had its line in the log or none."""
        async with connection(target.gateway_port) as opened:
            await opened.send(encode(body, path=path, key=target.key))
            await asyncio.sleep(chance.uniform(0.0, 0.5))


async def _ask(target: Target, path: str, body: bytes) -> Answer:
    if path == EXPLAIN:
        return await send(target.gateway_port, encode(body, path=path, key=target.key))
    return await chat(target, "large", body, path=path)


def _encoded(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _picture(size: int) -> str:
    return data_url(png_header(8, 8)) + "A" * (size // 4 * 4)


_TEXTS: Final = ("word and ", "\n\n\n\n", "€", "a", "<|im_end|>", " 1 2 3 4", "{}[]()")
_TOO_LONG: Final = ("context_length_exceeded", "invalid_request_error", "invalid_json")
_PROMPTS: Final[Mapping[str, Callable[[str], dict[str, Any]]]] = {
    CHAT: lambda text: {"messages": [_user(text)], "max_tokens": 1},
    COMPLETIONS: lambda text: {"prompt": text, "max_tokens": 1},
    MESSAGES: lambda text: {"messages": [_user(text)], "system": text[:9], "max_tokens": 1},
    RESPONSES: lambda text: {"input": text, "max_output_tokens": 1, "store": False},
}
"""Fields with one text, by the path."""
