"""Hostile bodies in every wire format, constraints that explode, and what masks cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from random import Random
from typing import Any, Final

from bench.attack.attack import COUNT_TOKENS, EXPLAIN, Attack
from bench.attack.http_client import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    chat_body,
    encode,
    send,
)
from bench.attack.lies import VALUES_AND_TYPES
from bench.attack.mutations import mutate
from bench.harness.parts import JOIN_TOKEN
from tests.support.images import data_url, png_header
from tests.support.worker_process import SUPPRESS_END_TOKENS

_MODEL: Final = "demo"
_WARM_UP: Final = 24
_PNG: Final = data_url(png_header(20, 10))
_VALUES: Final = (
    *VALUES_AND_TYPES,
    *(
        "Hi",
        "\ud7ff",
        "é" * 50,
        "<|im_end|>",
        "{{ 1 / 0 }}",
        "a" * 3000,
        "user",
        "tool",
        "function",
    ),
    *(_PNG, data_url(png_header(60_000, 60_000)), data_url(b"GIF89a"), "data:,", "x"),
    *("http://127.0.0.1:1/a.png", "file:///etc/passwd", "data:image/png;base64,!!!!", "(a+)+$"),
    *({"$ref": "#"}, {"$defs": {"a": {"$ref": "#"}}, "$ref": "#/$defs/a"}, {"enum": [{}]}),
)
_FIELDS: Final = (
    *"model messages stream stream_options temperature top_p top_k min_p n seed stop".split(),
    *"max_completion_tokens logprobs top_logprobs logit_bias presence_penalty".split(),
    *"frequency_penalty repetition_penalty tools tool_choice response_format metadata user".split(),
    *"parallel_tool_calls modalities audio prediction reasoning_effort service_tier store".split(),
    *"chat_template chat_template_kwargs add_generation_prompt echo suffix functions".split(),
)
_SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_CALL: Final = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def _said(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": [*parts]}


_USER: Final = {"role": "user", "content": "Hi"}
_TEXT: Final = _part("text", text="Hi")
_BASE64: Final = _part("base64", media_type="image/png", data=_PNG.partition(",")[2])
_MESSAGE: Final[Any] = {
    "max_tokens": 2,
    "system": [_part("text", text="Be brief.", cache_control=_part("ephemeral"))],
    "messages": [
        _said("user", _TEXT, _part("document", source=_part("text", data="one"))),
        _said(
            "assistant",
            _part("thinking", thinking="Hm.", signature="x"),
            _part("tool_use", id="call00001", name="f", input={"a": "1"}),
        ),
        _said(
            "user",
            _part("tool_result", tool_use_id="call00001", is_error=False, content=[_TEXT]),
        ),
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA, "strict": True}],
    "tool_choice": _part("auto", disable_parallel_tool_use=True),
    "thinking": _part("enabled", budget_tokens=5, display="omitted"),
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
    "temperature": 1,
    "metadata": {"user_id": "x"},
}
_BODIES: Final[Mapping[str, list[Any]]] = {
    MESSAGES: [
        _MESSAGE,
        {"max_tokens": 2, "messages": [_said("user", _part("image", source=_BASE64))]},
    ],
    COUNT_TOKENS: [_MESSAGE],
    RESPONSES: [
        {
            "max_output_tokens": 2,
            "instructions": "Be brief.",
            "input": [
                _said("user", _part("input_text", text="Hi")),
                _part("function_call", call_id="c", name="f", arguments="{}"),
                _part("function_call_output", call_id="c", output="one"),
                _part("reasoning", id="rs_1", summary=[], encrypted_content="x"),
            ],
            "tools": [_part("function", name="f", parameters=_SCHEMA, strict=True)],
            "tool_choice": "auto",
            "text": {"format": _part("text"), "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "previous_response_id": None,
            "store": False,
            "metadata": {"a": "b"},
        }
    ],
    COMPLETIONS: [
        {"max_tokens": 1, "prompt": ["a", "b", "a"], "n": 2, "echo": True},
        {"max_tokens": 1, "prompt": [[5, 6], [7]], "logprobs": 2},
        {"max_tokens": 0, "prompt": "a b", "echo": True, "logprobs": 1},
        {"max_tokens": 1, "prompt": [1, 2, 3], "suffix": "x", "best_of": 2},
    ],
    CHAT: [
        {"max_tokens": 4, "messages": [_USER], "tools": [_TOOL], "tool_choice": "required"},
        {
            "max_tokens": 4,
            "messages": [_USER],
            "response_format": _part("json_schema", json_schema={"name": "s", "schema": _SCHEMA}),
        },
        {
            "max_tokens": 2,
            "messages": [
                {"role": "system", "content": "Be brief."},
                _said("user", _TEXT, _part("image_url", image_url={"url": _PNG})),
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "one"},
            ],
            "tools": [_TOOL],
        },
    ],
}
"""Valid bodies without their model."""
_BOMB_SHARE: Final = 0.003
"""Each takes some seconds of a processor."""


def _mutated(path: str, chance: Random) -> Any:
    body = {"model": _MODEL, **deepcopy(chance.choice(_BODIES[path]))}
    mutate(body, chance, _VALUES)
    return body


def _encoded(body: Any) -> bytes:
    return json.dumps(body).encode(errors="surrogatepass")


def _structured(chance: Random) -> bytes:
    """Return a chat body with odd fields beside its wrong values."""
    body = _mutated(CHAT, chance)
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        body[chance.choice(_FIELDS)] = deepcopy(chance.choice(_VALUES))
    if chance.random() < 0.3:
        body["stream"] = True
    return _encoded(body)


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
            raw.decode(errors="surrogatepass").encode("utf-16", errors="surrogatepass"),
            b"\xef\xbb\xbf" + raw,
            raw.replace(b"1", b"NaN"),
            raw.replace(b"1", b"1" * 5000),
        )
    )


_KINDS: Final[Mapping[Callable[[Random], bytes], float]] = {
    _structured: 0.62,
    _deep: 0.1,
    _wide: 0.06,
    _damaged: 0.22,
}


class HostileBodies(Attack):
    """Bodies that a model server should refuse, at a real worker behind the gateway."""

    name = "bodies"
    promise = "an answer or an error that is the client's; the worker lives"
    share = 0.12

    async def prepare(self) -> None:
        """Send wide bodies at the same time: what they take is the peak of both processes."""
        if self.tally.inputs:  # once, in the first turn
            return
        bodies = [_wide(self.rng) for _ in range(_WARM_UP)]
        for worker in (False, True):
            await asyncio.gather(*(self._send(body, EXPLAIN, worker) for body in bodies))

    async def one(self, chance: Random) -> None:
        (make,) = chance.choices([*_KINDS], [*_KINDS.values()])
        raw, side = make(chance), chance.random()
        if side > 0.9:
            await self._send(raw, CHAT, True)
            return
        path = CHAT if side < 0.8 else EXPLAIN
        answer = await self.ask(raw, path, honest=path == CHAT)
        if answer.stream_error:
            self.tally.fail(f"a stream that ends in {answer.stream_error}", raw)

    async def _send(self, raw: bytes, path: str, worker: bool) -> None:
        port = self.target.worker_port if worker else self.target.gateway_port
        key = JOIN_TOKEN if worker else self.target.key
        self.tally.begin(raw[:99])
        answer = await send(port, encode(raw, path=CHAT if worker else path, key=key))
        self.tally.answer(answer, raw)


def _constraint(chance: Random) -> dict[str, Any]:
    """Return fields that prescribe an answer, some of which no compiler should be given."""
    count = chance.choice((2, 5, 12))
    if chance.random() < _BOMB_SHARE:
        count = 60
    rules = [f"R{n}: R{n + 1} R{n + 1}" for n in range(count // 2)]
    repeated = "".join(chance.choice(("(a|b)", "a{2,9}", ".*", "[^x]+", "(?:c?){5}")) for _ in "ab")
    schema = chance.choice(
        (
            {"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(count)]},
            {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#"},
            {"type": "array", "items": {"$ref": "#"}, "minItems": chance.choice((0, 10**9))},
            {"enum": list(range(count * 100))},
            {"type": "string", "minLength": 10 ** chance.randrange(12), "pattern": repeated},
            {"type": "number", "multipleOf": 10.0 ** -chance.randrange(12)},
            {"const": {"a": ["x" * 1000] * count}},
            {"properties": {f"p{n}": {"$ref": "#"} for n in range(count)}, "type": "object"},
        )
    )
    return chance.choice(
        (
            {"guided_json": schema},
            {"guided_regex": f"({repeated}){{{count}}}"},
            {"guided_grammar": "\n".join(["start: R0", *rules, f'R{count // 2}: "x"'])},
            {"guided_grammar": 'start: "a" start | start start | "b" |'},
            {"guided_grammar": 'root ::= "a" root | [^a-z] | ("b"){3,1000}'},
            {"guided_choice": ["a" * n for n in range(1, 1 + count)]},
        )
    )


class WireFormats(Attack):
    """Bodies of every route of clients with a few wrong values, and hostile constraints."""

    name = "formats"
    promise = "an answer or an error of the client, in the shape of the route; the worker lives"
    share = 0.12

    async def one(self, chance: Random) -> None:
        path = chance.choice((*_BODIES, EXPLAIN))
        body = _mutated(CHAT if path == EXPLAIN else path, chance)
        if path in (CHAT, COMPLETIONS) and chance.random() < 0.5:
            for name in ("tools", "tool_choice", "response_format"):
                body.pop(name, None)
            body |= _constraint(chance)
        if path not in (EXPLAIN, COUNT_TOKENS) and chance.random() < 0.4:
            body["stream"] = True
        raw = _encoded(body)
        self.check(await self.ask(raw, path), path, raw)


_COSTLY: Final = "constraint_too_costly"
_TERMINALS: Final = (
    *("/[a-z ]/", "/[a-z ]+/", "/./", "/(a|b|ab)*/", "/[^x]{1,40}/", "/(a?){20}a{20}/", '"a"'),
    *('"e"', '" "', '"the "', "/[a-m]+[g-z]+/", "/.*/", "/(.|..)+/"),
)
_MARKS: Final = ("", "", "", "?", "*", "+", "~1..9")


def _lark(chance: Random) -> str:
    """Return a grammar in which a text has many readings."""
    rules = [f"r{n}" for n in range(chance.randint(1, 5))]
    terminals = {f"T{n}": chance.choice(_TERMINALS) for n in range(chance.randint(1, 4))}
    names = (*rules, *terminals)

    def sequence() -> str:
        count = chance.choice((1, 2, 2, 3))
        return " ".join(chance.choice(names) + chance.choice(_MARKS) for _ in range(count))

    lines = [f"start: r0{chance.choice(_MARKS)}"]
    for rule in rules:
        ends = chance.choice(tuple(terminals))
        lines.append(
            f"{rule}: {' | '.join([*(sequence() for _ in range(chance.randint(1, 5))), ends])}"
        )
    return "\n".join([*lines, *(f"{name}: {pattern}" for name, pattern in terminals.items())])


def _overlapping(chance: Random, depth: int = 3) -> Any:
    """Return a schema with overlapping alternatives, or with many."""
    if not depth or chance.random() < 0.2:
        pattern = "".join(
            f"({chance.choice(('a|b|ab', '.|..', '[a-z]+', 'the |a ', 'x?'))}){{0,{count}}}"
            for count in chance.choices((2, 9, 40), k=chance.randint(1, 4))
        )
        words = [f"{chance.getrandbits(24):x}" for _ in range(chance.choice((2, 500, 3_000)))]
        return chance.choice(({"type": "string", "pattern": pattern}, {"enum": words}, {}))
    count = chance.choice((2, 5, 30))
    below = [_overlapping(chance, depth - 1) for _ in range(min(count, 4))]
    named = {f"{'ab' * n}"[:9] + f"{n}": below[n % len(below)] for n in range(count)}
    recursive = {"anyOf": [*below, {"items": {"$ref": "#/$defs/a"}}]}
    return chance.choice(
        (
            {"anyOf": below},
            {"type": "object", "properties": named},
            {"type": "array", "items": below[0], "minItems": count},
            {"type": "object", "additionalProperties": below[0], "minProperties": 1},
            {"$defs": {"a": recursive}, "$ref": "#/$defs/a"},
        )
    )


class CostlyGrammars(Attack):
    """Random grammars and schemas in which each mask is dear, in a worker that others share."""

    name = "grammars"
    promise = "an answer, a refusal or constraint_too_costly; the worker's other rows go on"
    share = 0.08
    concurrency = 6

    async def one(self, chance: Random) -> None:
        lark = chance.random() < 0.7
        field = "guided_grammar" if lark else "guided_json"
        body = chat_body(
            _MODEL,
            "Tell me a story.",
            max_tokens=chance.choice((8, 60, 300)),
            stream=chance.random() < 0.5,
            temperature=chance.choice((0, 1)),
            logit_bias=SUPPRESS_END_TOKENS,
            **{field: _lark(chance) if lark else _overlapping(chance)},
        )
        answer = await self.ask(body, given=body[field])
        if _COSTLY in (answer.code, answer.stream_error):
            self.tally.answers[_COSTLY] += 1
        else:
            self.check(answer, CHAT, body[field])
