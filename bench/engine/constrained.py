"""The speed of constrained answers against free ones, on the demo model.

`python -m bench.engine.constrained` writes `bench/results/constrained.md`. The first constraint
allows any text, so both answers have the same tokens: the difference is what the masks cost. The
other one forces most of its text, which then needs no draft of the head.
"""

from __future__ import annotations

import asyncio
import logging
import time
from statistics import median
from typing import Any, Final

from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import Grid, provenance, report
from paceline.request.constraint import Constraint, ConstraintKind
from tests.support.engine_answers import generation_for
from tests.support.served_engine import running_engine
from workers.engine.engine import Engine
from workers.engine.types import Delta, Finished

REPETITIONS: Final = 9
FLAGS: Final[dict[str, Any]] = {f"field_number_{at}": {"type": "boolean"} for at in range(8)}
ANY_TEXT: Final = Constraint(ConstraintKind.REGEX, "(?s:.*)", "guided_regex")
RECORD: Final = Constraint(
    ConstraintKind.JSON,
    {
        "type": "object",
        "properties": FLAGS,
        "required": [*FLAGS],
        "additionalProperties": False,
    },
    "guided_json",
)


async def speed(engine: Engine, rows: int, constraint: Constraint | None, k: int | None) -> float:
    """Return the tokens per second of all rows together, from the first text of each on."""
    fields = {"max_tokens": 128, "draft_tokens": k, "constraint": constraint}
    generation = generation_for(engine, "Count from 1 to 40.", **fields)

    async def answer() -> float:
        first_s, first_tokens = 0.0, 0
        async for event in engine.generate(generation):
            if isinstance(event, Delta) and not first_tokens:
                first_s, first_tokens = time.perf_counter(), event.usage.completion_tokens
            elif isinstance(event, Finished):
                tokens = event.usage.completion_tokens - first_tokens
                return tokens / (time.perf_counter() - first_s)
        raise AssertionError("every generation finishes")

    return sum(await asyncio.gather(*(answer() for _ in range(rows))))


async def measure(engine: Engine) -> Grid:
    lines = []
    for rows in (1, 8):
        for k in (0, 2, None):
            kinds = [("free", None), ("same", ANY_TEXT), ("forced", RECORD)]
            speeds: dict[str, list[float]] = {name: [] for name, _ in kinds}
            for _ in range(REPETITIONS + 1):
                for name, constraint in kinds:
                    speeds[name].append(await speed(engine, rows, constraint, k))
                kinds.reverse()
            free, *others = (median(samples[1:]) for samples in speeds.values())
            cells = [cell for one in others for cell in (f"{one:.0f}", f"{one / free:.2f}")]
            lines.append((rows, "adaptive" if k is None else k, f"{free:.0f}", *cells))
    columns = (
        *("rows", "drafts", "free", "same text, masked", "ratio", "schema that forces"),
        "ratio",
    )
    return Grid("Tokens per second, constrained and free", columns, lines)


def main() -> None:
    logging.disable()
    with running_engine() as engine:
        grid = asyncio.run(measure(engine))
    about = f"{provenance()}; medians of {REPETITIONS} runs each, taken in turn."
    report("constrained.md", "Constrained answers", about, grid)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.constrained")
    main()
