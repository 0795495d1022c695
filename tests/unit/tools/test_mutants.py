"""The mutation tool: excluded mutants, chosen tests and stored results."""

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
def mutants(root: Path) -> list[Mutant]:
    mutations = all_mutations(root, ["gateway/part.py"], root)
    return draw(root, mutations, load_config().skip, count=1000, seed=1)


def position(text: str) -> tuple[int, int]:
    at = MODULE.index(text)
    return MODULE.count("\n", 0, at) + 1, at - MODULE.rfind("\n", 0, at) - 1


@pytest.mark.parametrize(
    ("text", "spared"),
    [
        *(
            (text, True)
            for text in (
                *("1\n\nLIMIT", "True, order", "| None, Field", "| None, *", "*, by"),
                *("| None:\n", "+ 6"),
            )
        ),
        *((text, False) for text in ("2\n", "True)", "3)]", "4\n", "5)", "+ by", "> LIMIT")),
    ],
)
def test_mutants_without_effect_are_excluded(text: str, spared: bool) -> None:
    assert Spared(MODULE, load_config().skip).covers(position(text)) is spared


def test_a_seed_determines_the_order_of_the_sample(root: Path, mutants: list[Mutant]) -> None:
    mutations = all_mutations(root, ["gateway/part.py"], root)
    few, other = (draw(root, mutations, load_config().skip, count=5, seed=seed) for seed in (1, 2))
    assert few == mutants[:5]
    assert other != few
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    assert ("LIMIT = 2", "LIMIT = 3") in {(mutant.line, mutant.becomes) for mutant in mutants}
    assert all(mutant.line != mutant.becomes for mutant in mutants)


def test_a_target_that_matches_no_file_is_rejected(root: Path) -> None:
    assert find_targets(root, ["gateway/*.py"]) == ["gateway/other.py", "gateway/part.py"]
    with pytest.raises(ValueError, match=r"missing/\*\.py"):
        find_targets(root, ["missing/*.py"])


def test_the_tests_of_a_line_run_it_or_use_a_name_that_it_binds(root: Path) -> None:
    body = position("return x")[0]
    tests_of = {("gateway/part.py", body): ["grow"], ("gateway/other.py", 7): ["twice"]}
    reach = Reach(root, tests_of, ["gateway/part.py", "gateway/other.py"])
    for text, tests in (("> LIMIT", {"grow"}), ("5)", {"grow"}), ("2\n", {"grow", "twice"})):
        assert reach.tests("gateway/part.py", position(text)) == tests
    assert reach.tests("gateway/part.py", position("4\n")) == set()


def test_a_result_is_valid_until_its_tests_change(tmp_path: Path, mutants: list[Mutant]) -> None:
    killed, survived = mutants[0], mutants[1]
    tests = ["a.py::one", "b.py::two"]
    before = Measured(seconds=dict.fromkeys(tests, 0.1), digests={"a.py": "1", "b.py": "1"})
    results = Results(tmp_path / "results.jsonl")
    by_one, by_none = proof(tests[:1], before), proof(tests, before)
    results.add(Result(key=killed.key, outcome=Outcome.KILLED, killer=tests[0], proof=by_one))
    results.add(Result(key=survived.key, outcome=Outcome.SURVIVED, proof=by_none))
    stored = Results(tmp_path / "results.jsonl")
    after = Measured(seconds=before.seconds, digests={"a.py": "1", "b.py": "2"})

    assert stored.valid(killed, tests, before) is not None
    assert stored.valid(survived, tests, before) is not None
    assert stored.valid(killed, tests, after) is not None
    assert stored.valid(survived, tests, after) is None


def test_an_accepted_survivor_needs_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "equivalent.toml"
    entry = '[[survivor]]\nmodule = "m"\noperator = "o"\nline = "l"\nbecomes = "b"\nreason = "{}"\n'
    path.write_text(entry.format("It is never read."))
    assert load_accepted(path)[0].reason == "It is never read."
    path.write_text(entry.format(" "))
    with pytest.raises(ValueError, match="no reason"):
        load_accepted(path)
    load_accepted()
