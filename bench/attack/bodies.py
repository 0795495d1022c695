"""Hostile bodies: odd fields, deep and wide JSON, tools, schemas and pictures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any, Final

from bench.attack.attack import Tally, Target, play
from bench.attack.http_client import CHAT, chat, encode, send
from tests.support.hostile_checkpoints import VALUES
from tests.support.images import data_url, png_header

MODEL: Final = "demo"
_WARM_UP: Final = 24
_TEXTS: Final = (
    "Hi",
    "",
    "\0",
    "\ud7ff",
    "é" * 50,
    "<|im_end|>",
    "{{ 1 / 0 }}",
    "\x1b[2J",
    "a" * 3000,
)
_PICTURE: Final = data_url(png_header(20, 10))
_URLS: Final = (
    *(_PICTURE, data_url(png_header(60_000, 60_000)), data_url(b"GIF89a"), "data:,", "x", ""),
    *("http://127.0.0.1:1/a.png", "file:///etc/passwd", "data:image/png;base64,!!!!"),
)  # fmt: skip
_FIELDS: Final = (
    *"model messages stream stream_options temperature top_p top_k min_p n seed stop".split(),
    *"max_completion_tokens logprobs top_logprobs logit_bias presence_penalty".split(),
    *"frequency_penalty repetition_penalty tools tool_choice response_format metadata user".split(),
    *"parallel_tool_calls modalities audio prediction reasoning_effort service_tier store".split(),
    *"chat_template chat_template_kwargs add_generation_prompt echo suffix functions".split(),
)  # fmt: skip
_ROLES: Final = ("user", "user", "system", "developer", "assistant", "tool", "function", "", "x")


def _value(chance: Random) -> Any:
    return chance.choice((chance.choice(VALUES), chance.choice(_TEXTS), chance.uniform(-3, 3)))


def _message(chance: Random) -> Any:
    content: Any = chance.choice((*_TEXTS, None, 5, [], {}))
    if chance.random() < 0.3:
        content = [_part(chance) for _ in range(chance.randint(0, 4))]
    message: Any = {"role": chance.choice(_ROLES), "content": content}
    if chance.random() < 0.15:
        message["tool_calls"] = chance.choice((_value(chance), [_call(chance)]))
    if chance.random() < 0.15:
        name = chance.choice(("name", "tool_call_id", "reasoning_content", "refusal", "audio"))
        message[name] = _value(chance)
    return message if chance.random() < 0.97 else _value(chance)


def _part(chance: Random) -> Any:
    return chance.choice(
        (
            {"type": "text", "text": chance.choice(_TEXTS)},
            {"type": "image_url", "image_url": {"url": chance.choice(_URLS)}},
            {"type": chance.choice(("input_audio", "file", 5)), "file": _value(chance)},
            _value(chance),
        )
    )  # fmt: skip


def _call(chance: Random) -> Any:
    function: Any = {
        "name": chance.choice(_TEXTS),
        "arguments": chance.choice(("{}", "{", {}, None)),
    }
    return {"id": "c", "type": "function", "function": function}


def _tool(chance: Random) -> Any:
    parameters = _schema(chance, 4)
    function: Any = {"name": chance.choice(("f", "", "a b")), "parameters": parameters}
    if chance.random() < 0.3:
        function["description"] = _value(chance)
    return {"type": chance.choice(("function", "function", "x", 5)), "function": function}


def _schema(chance: Random, depth: int) -> Any:
    if not depth or chance.random() < 0.2:
        return chance.choice(({}, {"type": "string"}, {"type": ["a", 5]}, True, _value(chance)))
    below = _schema(chance, depth - 1)
    return chance.choice(
        (
            {"type": "object", "properties": {"a": below, "": below}, "required": ["a", 5]},
            {"type": "array", "items": below},
            {"anyOf": [below, below]},
            {"$ref": "#"},
            {"$defs": {"a": below}, "$ref": "#/$defs/a"},
            {"enum": [below]},
            {"type": "string", "pattern": "(a+)+$"},
        )
    )


def _structured(chance: Random) -> bytes:
    """Return a chat body with odd fields, messages and tools."""
    body: Any = {
        "model": MODEL,
        "messages": [_message(chance) for _ in range(chance.choice((0, 1, 1, 1, 2, 3, 50)))],
        "max_tokens": chance.choice((1, 2, 4)),
    }
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        body[chance.choice(_FIELDS)] = _value(chance)
    if chance.random() < 0.3:
        body["tools"] = [_tool(chance) for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.1:
        schema = {"name": "s", "schema": _schema(chance, 5)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if chance.random() < 0.3:
        body["stream"] = True
    return json.dumps(body).encode(errors="surrogatepass")


def _deep(chance: Random) -> bytes:
    levels = chance.choice((150, 199, 200, 201, 1000, 50_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    inner = opening * levels + b"1" + closing * chance.choice((levels, levels, 0))
    return b'{"model":"demo","max_tokens":1,"metadata":%b,"messages":[]}' % inner


def _wide(chance: Random) -> bytes:
    piece = chance.choice((b"[],", b"{},", b"0,", b'"",', b"[[]],", b"null,"))
    values = piece * chance.choice((100, 10_000, 300_000)) + b"0"
    field = chance.choice((b"metadata", b"stop", b"tools", b"x", b"user"))
    return b'{"model":"demo","max_tokens":1,"%b":[%b],"messages":[]}' % (field, values)


def _damaged(chance: Random) -> bytes:
    raw = _structured(chance)
    at = chance.randrange(len(raw) + 1)
    return chance.choice(
        (
            raw[:at],
            raw[:at] + chance.randbytes(3) + raw[at:],
            raw + raw,
            raw.replace(b"{", b'{"model":"demo",', 1),
            raw.decode().encode("utf-16"),
            b"\xef\xbb\xbf" + raw,
            raw.replace(b"1", b"NaN"),
            raw.replace(b"1", b"1" * 5000),
        )
    )


_KINDS: Final[tuple[tuple[float, Callable[[Random], bytes]], ...]] = (
    (0.62, _structured),
    (0.1, _deep),
    (0.06, _wide),
    (0.22, _damaged),
)


class HostileBodies:
    """Bodies that a model server should refuse, at a real worker behind the gateway."""

    name = "bodies"
    promise = "an answer or an error that is the client's; the worker lives"
    share = 0.12

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        await self._warm_up(target, rng, tally)

        async def one(chance: Random) -> None:
            (make,) = chance.choices([k for _, k in _KINDS], [w for w, _ in _KINDS])
            raw = make(chance)
            side = chance.random()
            if side < 0.8:
                answer = await chat(target, "body", raw, honest=True)
            elif side < 0.9:
                explain = encode(raw, path="/v1/route/explain", key=target.key)
                answer = await send(target.gateway_port, explain)
            else:
                answer = await send(
                    target.worker_port, encode(raw, path=CHAT, key=target.join_token)
                )
            tally.inputs += 1
            tally.answer(answer, raw)
            if answer.stream_error:
                tally.fail(f"a stream that ends in {answer.stream_error}", raw)

        await play(one, rng, deadline_s, concurrency=8)

    async def _warm_up(self, target: Target, rng: Random, tally: Tally) -> None:
        """Send wide bodies at the same time: what they take is the peak of both processes."""
        bodies = [_wide(rng) for _ in range(_WARM_UP)]
        ports = ((target.gateway_port, target.key), (target.worker_port, target.join_token))
        for port, key in ports:
            path = "/v1/route/explain" if port == target.gateway_port else CHAT
            sent = [send(port, encode(body, path=path, key=key)) for body in bodies]
            for body, answer in zip(bodies, await asyncio.gather(*sent), strict=True):
                tally.inputs += 1
                tally.answer(answer, body)
