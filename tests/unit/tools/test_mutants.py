"""What `make mutants` leaves out, which tests it chooses, and which results it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants.config import load_accepted, load_config
from tools.mutants.measure import Measured
from tools.mutants.mutants import Mutant, Spared, all_mutations, draw, find_targets
from tools.mutants.reach import Reach
from tools.mutants.trial import Outcome, Result, Results, proof

MODULE = """
from typing import TYPE_CHECKING, Annotated, overload

if TYPE_CHECKING:
    SPARED_A = 1

LIMIT = 2


@dataclass(frozen=True, order=True)
class Part:
    size: Annotated[int | None, Field(gt=3)] = 4


def grow(x: int | None, *, by: int = 5) -> int | None:
    log.info("é %d", x + 6)
    return x + by if x > LIMIT else None
"""
OTHER = """
from gateway.part import LIMIT

TWICE = LIMIT * 2

def twice():
    return TWICE
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "part.py").write_text(MODULE)
    (tmp_path / "gateway" / "other.py").write_text(OTHER)
    return tmp_path


@pytest.fixture
def drawn(root: Path) -> list[Mutant]:
    mutations = all_mutations(root, ["gateway/part.py"], root)
    return draw(root, mutations, load_config().skip, count=1000, seed=1)


def place(text: str) -> tuple[int, int]:
    at = MODULE.index(text)
    return MODULE.count("\n", 0, at) + 1, at - MODULE.rfind("\n", 0, at) - 1


@pytest.mark.parametrize(
    ("text", "spared"),
    [
        ("1\n\nLIMIT", True),
        ("2\n", False),
        ("True, order", True),
        ("True)", False),
        ("| None, Field", True),
        ("3)]", False),
        ("4\n", False),
        ("| None, *", True),
        ("*, by", True),
        ("5)", False),
        ("| None:\n", True),
        ("+ 6", True),
        ("+ by", False),
        ("> LIMIT", False),
    ],
)
def test_only_what_cannot_matter_is_left_out(text: str, spared: bool) -> None:
    assert Spared(MODULE, load_config().skip).covers(place(text)) is spared


def test_one_seed_draws_one_sample_and_more_begins_with_the_same(
    root: Path, drawn: list[Mutant]
) -> None:
    mutations = all_mutations(root, ["gateway/part.py"], root)
    few = draw(root, mutations, load_config().skip, count=5, seed=1)
    other = draw(root, mutations, load_config().skip, count=5, seed=2)

    assert few == drawn[:5]
    assert other != few
    assert len({one.key for one in drawn}) == len(drawn)


def test_a_mutant_shows_its_line_before_and_after(drawn: list[Mutant]) -> None:
    lines = {(one.line, one.becomes) for one in drawn}

    assert ("LIMIT = 2", "LIMIT = 3") in lines
    assert all(one.line != one.becomes for one in drawn)


def test_a_target_that_matches_nothing_is_refused(root: Path) -> None:
    assert find_targets(root, ["gateway/*.py"]) == ["gateway/other.py", "gateway/part.py"]
    with pytest.raises(ValueError, match=r"gone/\*\.py"):
        find_targets(root, ["gone/*.py"])


def test_a_line_is_reached_by_the_tests_that_run_it_or_use_what_it_binds(root: Path) -> None:
    body = place("return x")[0]
    tests_of = {("gateway/part.py", body): ["t::grow"], ("gateway/other.py", 7): ["t::twice"]}
    reach = Reach(root, tests_of, ["gateway/part.py", "gateway/other.py"])

    assert reach.tests("gateway/part.py", place("> LIMIT")) == {"t::grow"}
    assert reach.tests("gateway/part.py", place("5)")) == {"t::grow"}
    assert reach.tests("gateway/part.py", place("2\n")) == {"t::grow", "t::twice"}
    assert reach.tests("gateway/part.py", place("4\n")) == set()


def test_a_result_is_kept_until_its_tests_change(tmp_path: Path, drawn: list[Mutant]) -> None:
    killed, survived = drawn[0], drawn[1]
    tests = ["a.py::one", "b.py::two"]
    then = Measured(seconds=dict.fromkeys(tests, 0.1), digests={"a.py": "1", "b.py": "1"})
    results = Results(tmp_path / "results.jsonl")
    results.add(
        Result(
            key=killed.key, outcome=Outcome.KILLED, killer=tests[0], proof=proof(tests[:1], then)
        )
    )
    results.add(Result(key=survived.key, outcome=Outcome.SURVIVED, proof=proof(tests, then)))
    read = Results(tmp_path / "results.jsonl")
    now = Measured(seconds=then.seconds, digests={"a.py": "1", "b.py": "2"})

    assert read.valid(killed, tests, then) is not None
    assert read.valid(survived, tests, then) is not None
    assert read.valid(killed, tests, now) is not None
    assert read.valid(survived, tests, now) is None


def test_an_accepted_survivor_gives_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "equivalent.toml"
    entry = '[[survivor]]\nmodule = "m"\noperator = "o"\nline = "l"\nbecomes = "b"\nreason = "{}"\n'
    path.write_text(entry.format("It is never read."))
    assert load_accepted(path)[0].reason == "It is never read."
    path.write_text(entry.format(" "))
    with pytest.raises(ValueError, match="no reason"):
        load_accepted(path)
    load_accepted()
