"""`make mutants`: change the program at random places, and count the changes that pass all tests.

cosmic-ray lists every mutation of the target modules and filters them; a seed determines a sample.
Each mutant runs in a copy of the tree against the files of tests that run its line, until one
fails. Results are stored in `.mutants/`: an interrupted run resumes, and after a change of tests
only mutants whose result may differ run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from tools.mutants.mutants import Mutant, all_mutations, draw, find_targets, load_accepted
from tools.mutants.mutants import load_config as load
from tools.mutants.runs import Lines, Tree, project_files, test_files

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".mutants"
KILLED, TIMED_OUT, SURVIVED, NOT_RUN, ACCEPTED = (
    *("killed", "timed out", "survived", "not run", "accepted"),
)
_COLUMNS = (KILLED, TIMED_OUT, SURVIVED, NOT_RUN, ACCEPTED)
_UNDETECTED = (SURVIVED, NOT_RUN)
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)


class Result(NamedTuple):
    """The outcome of a mutant, and the digest of the tests that determine it."""

    outcome: str
    proof: str
    tests: list[str]
    """The file that fails, or all that pass."""


class Results:
    """Results of this run and of earlier ones, one JSON document per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        complete = (json.loads(line) for line in lines if line.endswith("]"))
        self._by_key = {key: Result(*result) for key, *result in complete}

    def add(self, mutant: Mutant, result: Result) -> None:
        """Store a result at once, so that an interruption loses none."""
        self._by_key[mutant.key] = result
        with self._path.open("a") as file:
            file.write(json.dumps([mutant.key, *result]) + "\n")

    def valid(self, mutant: Mutant, tests: Sequence[str], lines: Lines) -> Result | None:
        """Return an earlier result if the tests that determine it are unchanged."""
        result = self._by_key.get(mutant.key)
        if result is None:
            return None
        deciding = tests if result.outcome in _UNDETECTED else result.tests
        return result if result.proof == proof(deciding, lines) else None


def proof(tests: Sequence[str], lines: Lines) -> str:
    """Return a digest of files of tests."""
    found = sorted((one, lines.measured.get(one, {}).get("digest")) for one in tests)
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def judge(
    mutant: Mutant, tests: Sequence[str], tree: Tree, lines: Lines, config: Mapping[str, Any]
) -> Result:
    """Run files of tests against a mutant until one fails."""
    with tree.mutated(mutant.module, mutant.mutated):
        for file in tests:
            clean_s = lines.measured[file]["seconds"]
            limit_s = config["timeout_start_s"] + config["timeout_factor"] * clean_s
            status = tree.pytest(file, limit_s)
            if status != 0:
                outcome = TIMED_OUT if status is None else KILLED
                return Result(outcome, proof([file], lines), [file])
    return Result(SURVIVED if tests else NOT_RUN, proof(tests, lines), list(tests))


def run_all(arguments: argparse.Namespace, config: Mapping[str, Any], scratch: Path) -> int:
    """Draw and run the mutants in copies of the tree."""
    files = project_files(ROOT)
    # The run reads the first copy, so that edits of the working tree do not affect it.
    trees = [Tree(scratch / "0", ROOT, files)]
    root = trees[0].root
    trees += [Tree(scratch / str(number), root, files) for number in range(1, arguments.jobs)]
    modules = find_targets(root, arguments.targets or config["targets"])
    mutations = all_mutations(root, modules, STATE)
    mutants = draw(root, mutations, config["lines"], count=arguments.count, seed=arguments.seed)
    found = f"{len(mutants)} of {len(mutations)} mutations of {len(modules)} modules"
    console.print(f"{found}, seed {arguments.seed}")
    if arguments.list:
        for mutant in mutants:
            show(mutant, "")
        return 0
    lines = Lines(root, STATE / "lines.json")
    results = Results(STATE / "results.jsonl")
    accepted = load_accepted()
    by_mutant: dict[Mutant, Result] = {}
    try:
        outdated = lines.load(test_files(root, arguments.tests or config["tests"]))
        in_parallel(
            "measuring the tests",
            outdated,
            lambda file, tree: lines.measure(file, tree, config["measured"]),
            trees,
        )
        waiting = []
        for mutant in mutants:
            tests = lines.tests(mutant.module, mutant.at, config["budget_s"])
            earlier = results.valid(mutant, tests, lines)
            if mutant.entry in accepted:
                earlier = Result(ACCEPTED, "", [])
            if earlier is None:
                waiting.append((mutant, tests))
            else:
                by_mutant[mutant] = earlier

        def run(one: tuple[Mutant, list[str]], tree: Tree) -> None:
            mutant, tests = one
            by_mutant[mutant] = judge(mutant, tests, tree, lines, config)
            results.add(mutant, by_mutant[mutant])

        in_parallel("running mutants", waiting, run, trees)
    finally:
        for tree in trees:
            tree.close()
    return report(by_mutant, config["allowed_survivors"])


def in_parallel(
    title: str, items: Sequence[Any], do: Callable[[Any, Tree], None], trees: Iterable[Tree]
) -> None:
    """Do something with each item in a free tree."""
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def work(item: Any) -> None:
        tree = free.get()
        try:
            do(item, tree)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(free.qsize()) as threads:
        futures = [threads.submit(work, item) for item in items]
        try:
            for future in track(as_completed(futures), title, len(futures), console=console):
                future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for tree in trees:
                tree.close()
            raise


def report(results: Mapping[Mutant, Result], allowed: float) -> int:
    """Print the table and the survivors; return 1 if there are too many."""
    by_module: dict[str, Counter[str]] = defaultdict(Counter)
    entries = []
    for mutant, result in sorted(results.items(), key=lambda one: (one[0].module, one[0].at)):
        by_module[mutant.module][result.outcome] += 1
        if result.outcome in _UNDETECTED:
            show(mutant, f"{len(result.tests)} files of tests run the line")
            names = ("module", "operator", "line", "becomes")
            pairs = zip(names, mutant.entry, strict=True)
            fields = [f"{name} = {json.dumps(text, ensure_ascii=False)}" for name, text in pairs]
            head = [f"# line {mutant.at}", "[[survivor]]"]
            entries.append("\n".join([*head, *fields, 'reason = ""', ""]))
    (STATE / "survivors.toml").write_text("\n".join(entries))  # for `equivalent.toml`
    by_module["all"] = sum(by_module.values(), Counter())
    table = Table(Column("module", overflow="fold"), *_COLUMNS)
    for module, counts in by_module.items():
        table.add_row(module, *(str(counts[outcome] or "") for outcome in _COLUMNS))
    console.print(table)
    counted = len(results) - by_module["all"][ACCEPTED]
    share = len(entries) / counted if counted else 0.0
    console.print(
        f"{len(entries)} of {counted} not detected: {share:.1%}; at most {allowed:.0%} are allowed"
    )
    return int(share > allowed)


def show(mutant: Mutant, note: str) -> None:
    """Print a mutant as a diff."""
    console.print(f"{mutant.module}:{mutant.at} {mutant.operator} {note}", style="bold")
    for line in mutant.diff:
        console.print(line, style="red" if line.startswith("-") else "green", soft_wrap=True)


def main() -> int:
    """Draw mutants, run them and report; return the exit status."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent runs")
    parser.add_argument("--targets", nargs="+", metavar="GLOB", help="modules to mutate")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="folders or files of tests")
    parser.add_argument("--list", action="store_true", help="print the mutants, run none")
    # SIGTERM stops the running tests as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    STATE.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
            return run_all(parser.parse_args(), load(), Path(scratch))
    except (ValueError, RuntimeError) as error:
        console.print(f"mutants: {error}", style="red", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes")
        return 130


if __name__ == "__main__":
    sys.exit(main())
