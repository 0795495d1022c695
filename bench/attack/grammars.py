"""Random grammars and schemas by what their masks cost, in a worker that a neighbour shares."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

from bench.attack.attack import Tally, Target, play
from bench.attack.formats import problem_of
from bench.attack.http_client import CHAT, chat, chat_body
from tests.support.worker_process import SUPPRESS_END_TOKENS

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

    def alternatives(ends: str) -> str:
        return " | ".join([*(sequence() for _ in range(chance.randint(1, 5))), ends])

    lines = [f"{rule}: {alternatives(chance.choice(tuple(terminals)))}" for rule in rules]
    lines += [f"{name}: {pattern}" for name, pattern in terminals.items()]
    return "\n".join([f"start: r0{chance.choice(_MARKS)}", *lines])


def _schema(chance: Random, depth: int = 3) -> Any:
    """Return a schema with overlapping alternatives, or with many."""
    if not depth or chance.random() < 0.2:
        pattern = "".join(
            f"({chance.choice(('a|b|ab', '.|..', '[a-z]+', 'the |a ', 'x?'))}){{0,{count}}}"
            for count in chance.choices((2, 9, 40), k=chance.randint(1, 4))
        )
        words = [f"{chance.getrandbits(24):x}" for _ in range(chance.choice((2, 500, 3_000)))]
        return chance.choice(({"type": "string", "pattern": pattern}, {"enum": words}, {}))
    count = chance.choice((2, 5, 30))
    below = [_schema(chance, depth - 1) for _ in range(min(count, 4))]
    named = {f"{'ab' * n}"[:9] + f"{n}": below[n % len(below)] for n in range(count)}
    return chance.choice(
        (
            {"anyOf": below},
            {"type": "object", "properties": named},
            {"type": "array", "items": below[0], "minItems": count},
            {"type": "object", "additionalProperties": below[0], "minProperties": 1},
            {
                "$defs": {"a": {"anyOf": [*below, {"items": {"$ref": "#/$defs/a"}}]}},
                "$ref": "#/$defs/a",
            },
        )
    )


class CostlyGrammars:
    """Answers by grammars in which each mask is dear, six at a time."""

    name = "grammars"
    promise = "an answer, a refusal or constraint_too_costly; the worker's other rows go on"
    share = 0.08

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        async def one(chance: Random) -> None:
            lark = chance.random() < 0.7
            field = "guided_grammar" if lark else "guided_json"
            body = chat_body(
                "demo",
                "Tell me a story.",
                max_tokens=chance.choice((8, 60, 300)),
                stream=chance.random() < 0.5,
                temperature=chance.choice((0, 1)),
                logit_bias=SUPPRESS_END_TOKENS,
                **{field: _lark(chance) if lark else _schema(chance)},
            )
            tally.begin(json.dumps(body[field])[:400])
            answer = await chat(target, "grammar", json.dumps(body).encode())
            tally.answer(answer, body[field])
            costly = _COSTLY in (answer.code, answer.stream_error)
            if costly:
                tally.answers[_COSTLY] += 1
            elif problem := problem_of(answer, CHAT):
                tally.fail(problem, (body[field], answer.body[-200:]))

        await play(one, rng, deadline_s, concurrency=6)
