"""The report of `paceline doctor`: what follows from measurements, and how it reads."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from workers.doctor.report import (
    Equality,
    Machine,
    Model,
    NetworkAccess,
    Report,
    Round,
    advise,
    render,
)

GB = 10**9
MACHINE = Machine(
    chip="Apple M4 Max",
    model="Mac16,5",
    system="Darwin 15.6",
    python="3.12.1",
    versions={"mlx": "0.32.2"},
    cores=16,
    performance_cores=12,
    efficiency_cores=4,
    memory_bytes=64 * GB,
    metal=True,
    architecture="applegpu_g16s",
    generation=16,
    working_set_bytes=48 * GB,
    largest_buffer_bytes=36 * GB,
    wired_limit_bytes=0,
    network=NetworkAccess.ALLOWED,
)
MODEL = Model(
    name="Qwen/Qwen3.5-4B",
    family="qwen3_5",
    parameters=4 * GB,
    weights_bytes=8 * GB,
    context_tokens=262_144,
    load_s=2.5,
    shares_passes=True,
    verifies_natively=True,
    head="drafts",
    memory_limit_bytes=48 * GB,
    row_bytes=GB // 4,
    longest_row_tokens=200_000,
    peak_bytes=9 * GB,
)
# One row: k = 2 costs 1.5 rounds for 2.6 tokens. Eight rows: three times as much.
COSTS_S = {(1, 0): 0.010, (1, 1): 0.012, (1, 2): 0.015, (8, 0): 0.020, (8, 1): 0.040, (8, 2): 0.06}
ROUNDS = tuple(
    Round(rows=rows, k=k, round_s=cost_s, samples=16) for (rows, k), cost_s in COSTS_S.items()
)
SAME = Equality(answers=8, equal=8)
DIFFERENT = Equality(answers=8, equal=6, first_differences=(17, 31))
LONG_ROWS = MODEL.model_copy(update={"row_bytes": 12 * GB})


def report(machine: dict[str, Any] | None = None, **changes: Any) -> Report:
    fields = {"model": MODEL, "rounds": ROUNDS, "acceptance": (0.9, 0.8), **changes}
    changed = MACHINE.model_copy(update=machine or {})
    return Report(created="2026-11-25T09:00:00+00:00", machine=changed, **fields)


def advice_on(*arguments: Any, **changes: Any) -> str:
    return "\n".join(advise(report(*arguments, **changes)))


def text_of(found: Report) -> str:
    output = StringIO()
    Console(width=120, file=output).print(render(found))
    return output.getvalue()


def test_the_best_draft_length_has_the_most_tokens_a_second() -> None:
    found = report()
    assert found.tokens_per_round(2) == pytest.approx(1 + 0.9 + 0.9 * 0.8)
    assert found.tokens_per_s(1, 2) == pytest.approx(2.62 / 0.015)
    assert (found.best_k(1), found.best_k(8), found.best_k(4)) == (2, 0, None)


def test_the_advice_follows_from_the_measurements() -> None:
    advice = advice_on()
    assert "For one request 2 drafted tokens pay most: 1.75 times plain decoding." in advice
    assert "For 8 requests at once the head's drafts do not pay" in advice
    assert "8 requests at once get 2.3 times the tokens a second of one, 400 in all." in advice
    assert "about 64 billion parameters in 4 bits, or 34 in 8" in advice
    for word in ("float16", "exact"):
        assert word not in advice_on(in_company=SAME, with_drafts=SAME)


def test_without_measured_acceptance_nothing_is_said_of_drafts() -> None:
    """The time may be over before: rounds alone do not tell what drafts are worth."""
    found = report(acceptance=())
    assert found.tokens_per_s(1, 0) > 0
    assert found.tokens_per_s(1, 2) == 0
    assert found.best_k(1) == 0
    assert not any("draft" in line for line in advise(found))
    (row,) = (line for line in text_of(found).splitlines() if line.startswith("1 "))
    assert row.count("/s") == 1
    assert row.count("ms") == len({one.k for one in found.rounds})
    plain = report(rounds=[one for one in ROUNDS if not one.k or one.rows == 1])
    assert [line for line in advise(plain) if "draft" in line] == [next(advise(plain))]


@pytest.mark.parametrize(
    ("machine", "changes", "sentence"),
    [
        ({"generation": 14}, {}, "try `--dtype auto`"),
        ({"network": NetworkAccess.DENIED}, {}, "macOS does not let this terminal reach"),
        ({}, {"in_company": DIFFERENT}, '"exact": true'),
        ({}, {"with_drafts": DIFFERENT}, '"exact": true'),
        ({}, {"model": LONG_ROWS}, "holds 3 conversations of 8,192 tokens"),
    ],
)
def test_the_advice_names_what_stands_out(machine, changes, sentence) -> None:
    assert sentence in advice_on(machine, **changes)
    assert sentence not in advice_on()


def test_the_text_has_what_the_json_has() -> None:
    lists: Any = {"skipped": ("exact answers",), "failures": ("It broke.",), "advice": ("Run it.",)}
    exact = Equality(answers=8, equal=8, same_bits=8)
    text = text_of(report(exact=exact, with_drafts=DIFFERENT, **lists))
    for part in (
        "Apple M4 Max (Mac16,5)",
        "16 (12 fast, 4 efficient)",
        "Metal, applegpu_g16s",
        "64.00 GB in all, 48.00 GB for the GPU, 36.00 GB in one buffer",
        "15.0 ms  175/s",
        "Accepted drafts by position: 90%, 80%",
        "6 of 8; the others leave at token 17, 31",
        "8 of 8, 8 of them in every bit",
        "- exact answers",
        "- It broke.",
        "- Run it.",
    ):
        assert part in text, part


def test_a_report_of_a_cpu_that_measured_nothing_can_be_drawn() -> None:
    machine = {"metal": False, "working_set_bytes": 0, "model": "", "performance_cores": 0}
    text = text_of(report(machine, rounds=(), acceptance=()))
    assert "the CPU, in float32" in text
    assert "Rounds" not in text
