"""Random JSON Schemas on the demo model: does every answer validate?

`python -m bench.engine.schemas [--count 2000]` writes `bench/results/schemas.md`. Each schema is
asked once, eight at a time: greedy or sampled, with or without drafts. An answer must validate with
jsonschema-rs (formats too) unless it ended by `length`; a refused schema counts under its keyword.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter

import jsonschema_rs
from hypothesis import HealthCheck, Phase, given, seed, settings

from bench.harness.options import parser
from bench.harness.tables import Grid, report, show
from paceline.request.constraint import Constraint, ConstraintKind
from paceline.request.profile import Sampling
from tests.support.engine_answers import answer
from tests.support.schemas import Schema, keywords, schemas
from tests.support.served_engine import running_engine
from workers.engine.engine import Engine
from workers.engine.types import FinishReason, InvalidGeneration

MAX_TOKENS = 512
PENALTY = 1.0
OUTCOMES = ("valid", "length", "refused", "invalid", "not JSON")
QUESTIONS = ("Tell me about a person.", "What is the weather?", "Count from 1 to 9.", "Hello")


def draw_schemas(count: int) -> list[Schema]:
    drawn: list[Schema] = []

    @seed(22)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(schemas())
    def collect(schema: Schema) -> None:
        drawn.append(schema)

    collect()
    return drawn


async def ask(engine: Engine, index: int, schema: Schema, max_tokens: int) -> tuple[str, str]:
    """Return the outcome (`valid`, `length`, `refused`, `invalid`, `not JSON`) and its detail."""
    try:
        text, end = await answer(
            engine,
            QUESTIONS[index % 4],
            # The penalty lets most answers of the demo model end, which else repeats itself.
            sampling=Sampling(temperature=index // 4 % 2, seed=index, frequency_penalty=PENALTY),
            max_tokens=max_tokens,
            draft_tokens=None if index // 8 % 2 else 2,
            constraint=Constraint(ConstraintKind.JSON, schema, "response_format"),
        )
    except InvalidGeneration as error:
        named = re.search("'(.+?)'", error.message)
        return "refused", named[1] if named else error.message
    return ("length", text) if end.reason is FinishReason.LENGTH else check(schema, text)


def check(schema: Schema, text: str) -> tuple[str, str]:
    try:
        value = json.loads(text)
    except ValueError:
        return "not JSON", text
    try:
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(value)
    except jsonschema_rs.ValidationError as error:
        return "invalid", f"{error.message[:200]} in {text[:200]}"
    return "valid", text


async def ask_each(
    engine: Engine, asked: list[Schema], *, max_tokens: int = MAX_TOKENS
) -> list[tuple[str, str]]:
    free = asyncio.Semaphore(8)

    async def one(index: int) -> tuple[str, str]:
        async with free:
            return await ask(engine, index, asked[index], max_tokens)

    return await asyncio.gather(*map(one, range(len(asked))))


def tables_of(asked: list[Schema], outcomes: list[tuple[str, str]]) -> list[Grid]:
    """Return the outcomes, the keywords of refused schemas, and the outcomes by keyword."""
    counts = Counter(kind for kind, _ in outcomes)
    refused = Counter(detail for kind, detail in outcomes if kind == "refused")
    columns = [kind for kind in OUTCOMES if counts[kind]]
    by_keyword: dict[str, Counter[str]] = {}
    for schema, (kind, _) in zip(asked, outcomes, strict=True):
        for keyword in keywords(schema):
            by_keyword.setdefault(keyword, Counter())[kind] += 1
    shares = [(kind, n, f"{n / len(asked):.1%}") for kind, n in counts.most_common()]
    return [
        Grid("Outcomes", ("outcome", "answers", "share"), shares),
        Grid("Refused", ("refused for", "schemas"), refused.most_common()),
        Grid(
            "Outcomes by keyword",
            ("keyword", *columns),
            [
                (f"`{name}`", *(by[kind] for kind in columns))
                for name, by in sorted(by_keyword.items())
            ],
        ),
    ]


def main() -> None:
    made = parser("engine.schemas", __doc__, quick=False)
    made.add_argument("--count", type=int, default=2000)
    total = made.parse_args().count
    asked = draw_schemas(total)
    with running_engine() as engine:
        outcomes = asyncio.run(ask_each(engine, asked))
    bad = [one for one in zip(asked, outcomes, strict=True) if one[1][0] in OUTCOMES[-2:]]
    for schema, (kind, detail) in bad:
        show(f"{kind}: {json.dumps(schema)}\n    {detail}")
    about = (
        f"`python -m bench.engine.schemas --count {total}`: {total} schemas drawn by Hypothesis"
        " (`tests/support/schemas.py`), one answer of the demo model each, half of them sampled, "
        f"at most {MAX_TOKENS} tokens, eight at a time, with a frequency penalty of {PENALTY}: "
        "without one the demo model repeats itself in strings, keys and lists that have no bound, "
        "and 10.7% of the answers end by `length`, however long they may be. `valid`: "
        "jsonschema-rs accepts the answer."
    )
    report("schemas.md", "Random JSON Schemas", about, *tables_of(asked, outcomes))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
