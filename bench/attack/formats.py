"""Hostile bodies in every wire format, and constraints that explode, at a real worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from random import Random
from typing import Any, Final

from bench.attack.attack import Answer, Tally, Target, play
from bench.attack.http_client import CHAT, encode, send
from bench.attack.lies import VALUES_AND_TYPES
from tests.support.images import data_url, png_header

MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
COMPLETIONS: Final = "/v1/completions"
_UNCOUNTED: Final = ("/v1/messages/count_tokens", "/v1/route/explain")
"""Routes without a line in the access log."""
_MODEL: Final = "demo"
_PNG: Final = data_url(png_header(20, 10))
_SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
_MESSAGE: Final[Any] = {
    "model": _MODEL,
    "max_tokens": 2,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Hi"},
                {"type": "document", "source": {"type": "text", "data": "one"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "tool_use", "id": "call00001", "name": "f", "input": {"a": "1"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call00001",
                    "is_error": False,
                    "content": [{"type": "text", "text": "one"}],
                }
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA, "strict": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
    "temperature": 1,
    "metadata": {"user_id": "x"},
}
_BODIES: Final[Mapping[str, list[Any]]] = {
    MESSAGES: [
        _MESSAGE,
        {
            "model": _MODEL,
            "max_tokens": 2,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/png",
                                "data": _PNG.partition(",")[2],
                            },
                        }
                    ],
                }
            ],
        },
    ],
    _UNCOUNTED[0]: [_MESSAGE],
    RESPONSES: [
        {
            "model": _MODEL,
            "max_output_tokens": 2,
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "one"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "previous_response_id": None,
            "store": False,
            "metadata": {"a": "b"},
        }
    ],
    COMPLETIONS: [
        {"model": _MODEL, "max_tokens": 1, "prompt": ["a", "b", "a"], "n": 2, "echo": True},
        {"model": _MODEL, "max_tokens": 1, "prompt": [[5, 6], [7]], "logprobs": 2},
        {"model": _MODEL, "max_tokens": 0, "prompt": "a b", "echo": True, "logprobs": 1},
        {"model": _MODEL, "max_tokens": 1, "prompt": [1, 2, 3], "suffix": "x", "best_of": 2},
    ],
    CHAT: [
        {
            "model": _MODEL,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
            "tool_choice": "required",
        },
        {
            "model": _MODEL,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": _SCHEMA},
            },
        },
    ],
}
_BOMB_SHARE: Final = 0.003
"""Each takes some seconds of a processor."""


def mutate(document: Any, chance: Random) -> None:
    """Change a few values of a document in place, at any depth."""
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        parent = document
        while True:
            key: Any = chance.choice(
                list(parent) if isinstance(parent, dict) else range(len(parent))
            )
            child = parent[key]
            if not isinstance(child, dict | list) or not child or chance.random() < 0.2:
                break
            parent = child
        choice = chance.randrange(8)
        if choice == 0:
            del parent[key]
        elif choice == 1 and isinstance(parent, list):
            parent.extend(deepcopy(parent) * chance.choice((1, 1, 40)))
        else:
            parent[key] = deepcopy(chance.choice(VALUES_AND_TYPES))
        if not document:
            return


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


class WireFormats:
    """Bodies of every route of clients with a few wrong values, and hostile constraints."""

    name = "formats"
    promise = "an answer or an error of the client, in the shape of the route; the worker lives"
    share = 0.12

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        async def one(chance: Random) -> None:
            path = chance.choice((*_BODIES, _UNCOUNTED[1]))
            body = deepcopy(chance.choice(_BODIES[CHAT if path == _UNCOUNTED[1] else path]))
            if path in (CHAT, COMPLETIONS) and chance.random() < 0.5:
                for name in ("tools", "tool_choice", "response_format"):
                    body.pop(name, None)
                body |= _constraint(chance)
            mutate(body, chance)
            if isinstance(body, dict) and path not in _UNCOUNTED and chance.random() < 0.4:
                body["stream"] = True
            raw = json.dumps(body).encode(errors="surrogatepass")
            request_id = target.request_id("format")
            sent = encode(raw, path=path, key=target.key, request_id=request_id)
            answer = await send(target.gateway_port, sent)
            if answer.status and path not in _UNCOUNTED:
                target.sent.add(request_id)
            tally.inputs += 1
            tally.answer(answer, (path, raw))
            if problem := problem_of(answer, path):
                tally.fail(problem, (path, raw, answer.body[-200:]))

        await play(one, rng, deadline_s, concurrency=8)


def problem_of(answer: Answer, path: str) -> str:
    """Return what is wrong with the answer of an honest worker, or an empty string."""
    if answer.status != 200:
        return ""
    if not answer.streamed:
        try:
            answer.json()
        except ValueError:
            return "a whole answer that is no JSON"
        return ""
    if answer.stream_error:
        return f"a stream that ends in {answer.stream_error}"
    return "" if answer.ends_as(path) else "a stream without an end"
