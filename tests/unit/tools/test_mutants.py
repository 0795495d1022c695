"""The mutation tool: excluded mutants, chosen tests and stored results."""

from pathlib import Path

import pytest

from tools.mutants.__main__ import Result, Results, proof
from tools.mutants.mutants import (
    Mutant,
    all_mutations,
    draw,
    find_targets,
    load_accepted,
    load_config,
)
from tools.mutants.runs import Lines

MODULE = """
from typing import TYPE_CHECKING

LIMIT = 2


@dataclass(frozen=True)
class Part:
    size: int | None = 4


def grow(x: int | None, *, by: int = 5) -> int | None:
    log.info("é %d", x + 6)
    return x + by if x > LIMIT else None
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "part.py").write_text(MODULE)
    (tmp_path / "gateway" / "other.py").write_text("")
    return tmp_path


def drawn(root: Path, *, count: int = 1000, seed: int = 1) -> list[Mutant]:
    mutations = all_mutations(root, ["gateway/part.py"], root)
    return draw(root, mutations, load_config()["lines"], count=count, seed=seed)


def test_a_sample_has_the_changes_that_matter_and_no_others(root: Path) -> None:
    changes = {(mutant.line, mutant.entry[-1]) for mutant in drawn(root)}
    lines = {line for line, _ in changes}
    assert ("LIMIT = 2", "LIMIT = 3") in changes
    assert "size: int | None = 4" in lines
    assert not any("dataclass" in line or "log." in line for line in lines)
    assert all("|" in becomes or "|" not in line for line, becomes in changes)


def test_a_seed_determines_the_order_of_the_sample(root: Path) -> None:
    every = drawn(root)
    assert drawn(root, count=5) == every[:5] != drawn(root, count=5, seed=2)
    assert len({mutant.key for mutant in every}) == len(every)


def test_a_target_that_matches_no_file_is_rejected(root: Path) -> None:
    assert find_targets(root, ["gateway/*.py"]) == ["gateway/other.py", "gateway/part.py"]
    with pytest.raises(ValueError, match=r"missing/\*\.py"):
        find_targets(root, ["missing/*.py"])


def test_the_fastest_files_that_run_a_line_are_its_tests(root: Path) -> None:
    lines = Lines(root, root / "lines.json")
    for name, seconds, ran in (("slow", 9.0, [3]), ("fast", 1.0, [3]), ("other", 0.1, [4])):
        lines.measured[name] = {"seconds": seconds, "lines": {"gateway/part.py": ran}}
    assert lines.tests("gateway/part.py", 3, 100) == ["fast", "slow"]
    assert lines.tests("gateway/part.py", 3, 5) == ["fast"]
    assert lines.tests("gateway/part.py", 9, 100) == []


def test_a_result_is_valid_until_its_tests_change(root: Path) -> None:
    killed, survived = drawn(root, count=2)
    lines = Lines(root, root / "lines.json", {"a.py": {"digest": "1"}, "b.py": {"digest": "1"}})
    tests, path = ["a.py", "b.py"], root / "results.jsonl"
    results = Results(path)
    results.add(killed, Result("killed", proof(tests[:1], lines), tests[:1]))
    results.add(survived, Result("survived", proof(tests, lines), tests))
    stored = Results(path)

    assert stored.valid(killed, tests, lines) is not None
    assert stored.valid(survived, tests, lines) is not None
    lines.measured["b.py"] = {"digest": "2"}
    assert stored.valid(killed, tests, lines) is not None
    assert stored.valid(survived, tests, lines) is None


def test_an_accepted_survivor_needs_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "equivalent.toml"
    entry = '[[survivor]]\nmodule = "m"\noperator = "o"\nline = "l"\nbecomes = "b"\nreason = "{}"\n'
    path.write_text(entry.format("It is never read."))
    assert load_accepted(path) == {("m", "o", "l", "b"): "It is never read."}
    path.write_text(entry.format(" "))
    with pytest.raises(ValueError, match="no reason"):
        load_accepted(path)
    load_accepted()
