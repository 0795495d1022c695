"""An open step without the rows that left the batch."""

from typing import Any

import mlx.core as mx
import pytest

from paceline.protocol import DraftSource
from workers.engine.decode.batch import Drafts, OpenStep
from workers.engine.decode.draft_length import Plan
from workers.engine.decode.prompt_lookup import Found

ROWS = 3
SOURCES = [(DraftSource.HEAD,) * 2, (DraftSource.LOOKUP,), ()]


def numbered(*shape: int) -> mx.array:
    """Return an array of which no two rows are alike."""
    return mx.arange(mx.prod(mx.array((ROWS, *shape))).item()).reshape(ROWS, *shape)


def values(step: OpenStep) -> dict[str, Any]:
    """Return what a step has for each row."""
    recurrent = [
        [[part.tolist() for part in slot] for slot in layer]
        if isinstance(layer, list)
        else [slot.tolist() for slot in layer]
        for layer in step.recurrent
    ]
    return {
        "drafts": step.drafts.tolist(),
        "limits": [*step.limits],
        "sources": [*step.sources],
        "scores": step.scores.tolist(),
        "hidden": None if step.hidden is None else step.hidden.tolist(),
        "recurrent": recurrent,
    }


def rows_of(value: Any, rows: list[int], levels: int = 0) -> Any:
    if levels:
        return [rows_of(inner, rows, levels - 1) for inner in value]
    return None if value is None else [value[row] for row in rows]


@pytest.mark.parametrize("rows", [[1], [0, 2], [2, 1], [0, 1, 2]])
@pytest.mark.parametrize("hidden", [numbered(3, 2), None])
def test_a_step_has_the_parts_of_the_rows_that_stay(rows, hidden) -> None:
    step = OpenStep(
        planned=Drafts(Plan(2), runs=[(7, 8), (7,), ()], found=[Found((7, 8), 3), None, None]),
        drafts=numbered(2),
        limits=[2, 1, 0],
        head_length=2,
        sources=SOURCES,
        scores=numbered(3, 5),
        hidden=hidden,
        recurrent=[[(numbered(4), numbered(2, 2))], (numbered(3),)],
    )
    before, after = values(step), values(step.select(rows))
    histories, states = before.pop("recurrent")
    assert after.pop("recurrent") == [rows_of(histories, rows, 2), rows_of(states, rows, 1)]
    assert after == {name: rows_of(value, rows) for name, value in before.items()}
    assert step.select(rows).tokens == 3
    planned = step.select(rows).planned
    assert planned.runs == rows_of(step.planned.runs, rows)
    assert planned.found == rows_of(step.planned.found, rows)
