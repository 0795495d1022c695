"""`make mutants`: change the program at random places, and count the changes that pass all tests.

cosmic-ray lists every mutation of the target modules; a seed determines a sample of them. Each
mutant runs in a copy of the tree against the tests that run its line, until one fails. Results are
stored in `.mutants/`: an interrupted run resumes, and after a change of tests only mutants whose
result may differ run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from tools.mutants.config import ROOT, STATE, Accepted, Config, load_accepted, load_config
from tools.mutants.measure import Measured, Measurer, test_files
from tools.mutants.mutants import Mutant, all_mutations, draw, find_targets
from tools.mutants.reach import Reach
from tools.mutants.tree import Tree, project_files
from tools.mutants.trial import Judge, Outcome, Result, Results

COLUMNS = (Outcome.KILLED, Outcome.TIMED_OUT, Outcome.SURVIVED, Outcome.NOT_RUN, Outcome.ACCEPTED)
DETECTED = (Outcome.KILLED, Outcome.TIMED_OUT)
UNDETECTED = (Outcome.SURVIVED, Outcome.NOT_RUN)
Entry = tuple[str, str, str, str]
"""Module, operator, line before and after: the key of an accepted survivor."""
console = Console(width=None if sys.stdout.isatty() else 120)


def main() -> int:
    """Draw mutants, run them and report; return the exit status."""
    arguments = _parse()
    config = load_config()
    if arguments.targets:
        config = dataclasses.replace(config, targets=tuple(arguments.targets))
    if arguments.tests:
        config = dataclasses.replace(config, tests=tuple(arguments.tests))
    # SIGTERM stops the running tests as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    STATE.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
            return _run(arguments, config, Path(scratch))
    except (ValueError, RuntimeError) as error:
        console.print(f"mutants: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes")
        return 130


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent runs")
    parser.add_argument("--targets", nargs="+", metavar="GLOB", help="modules to mutate")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="folders or files of tests")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    parser.add_argument("--recheck", action="store_true", help="also run accepted survivors")
    parser.add_argument(
        "--list", action="store_true", help="print the mutants without running them"
    )
    return parser.parse_args()


def _run(arguments: argparse.Namespace, config: Config, scratch: Path) -> int:
    files = project_files(ROOT)
    # The run reads the first copy, so that edits of the working tree do not affect it.
    trees = [Tree(scratch / "0", ROOT, files)]
    root = trees[0].root
    trees += [Tree(scratch / str(number), root, files) for number in range(1, arguments.jobs)]
    entries = load_accepted()
    accepted = frozenset(_entry(entry) for entry in entries)
    modules = find_targets(root, config.targets)
    mutations = all_mutations(root, modules, STATE)
    mutants = draw(root, mutations, config.skip, count=arguments.count, seed=arguments.seed)
    console.print(
        f"{len(mutants)} of {len(mutations)} mutations of {len(modules)} modules, "
        f"seed {arguments.seed}"
    )
    _warn_of_outdated(root, entries)
    if arguments.list:
        for mutant in mutants:
            _show(mutant, "")
        return 0
    try:
        measured = _measure(config, root, trees)
        excluded = frozenset() if arguments.recheck else accepted
        path = STATE / "results.jsonl"
        if arguments.fresh:
            path.unlink(missing_ok=True)
        by_key = _run_all(
            config, mutants, measured, trees, results=Results(path), excluded=excluded
        )
    except BaseException:
        for tree in trees:
            tree.close()
        raise
    return _report(config, mutants, by_key, accepted)


def _measure(config: Config, root: Path, trees: Sequence[Tree]) -> Measured:
    """Update the map of lines and tests."""
    measurer = Measurer(config, root, STATE)
    files = test_files(root, config.tests)
    outdated = measurer.outdated(files)
    if outdated:
        with _progress() as progress:
            task = progress.add_task("measuring the tests", total=len(outdated))
            broken = measurer.measure(outdated, trees, done=lambda: progress.advance(task))
        if broken:
            # Without these files, the map would lack tests of some lines.
            names = ", ".join(sorted(file for file, _ in broken))
            raise RuntimeError(f"{broken[0][1].output}\ncould not be measured: {names}")
    measured = measurer.load(files)
    if measured.failed:
        console.print(f"{len(measured.failed)} tests fail on the clean tree and are excluded:")
        for test in measured.failed:
            console.print(f"  {test}", markup=False, soft_wrap=True)
    return measured


def _run_all(
    config: Config,
    mutants: Sequence[Mutant],
    measured: Measured,
    trees: Sequence[Tree],
    *,
    results: Results,
    excluded: frozenset[Entry],
) -> dict[str, Result]:
    """Return the result of each mutant by its key; run those without a valid result."""
    by_key: dict[str, Result] = {}
    reach = Reach(
        trees[0].root,
        measured.tests_of,
        sorted({*measured.files, *(item.module for item in mutants)}),
    )
    judge, free = Judge(config, measured), _queue(trees)
    for tree in trees:
        judge.check(tree)

    def run(mutant: Mutant, tests: Sequence[str], complete: bool) -> Result:
        tree = free.get()
        try:
            return judge.judge(mutant, tests, tree, complete=complete)
        finally:
            free.put(tree)

    with _progress() as progress, ThreadPoolExecutor(len(trees)) as threads:
        task = progress.add_task("running mutants", total=len(mutants))
        waiting: set[Future[Result]] = set()
        for mutant in mutants:
            if _entry(mutant) in excluded:
                result = Result(key=mutant.key, outcome=Outcome.ACCEPTED, proof="")
            else:
                reached = reach.tests(mutant.module, mutant.at)
                tests, complete = measured.fastest(reached, config.tests_budget_s)
                earlier = results.valid(mutant, tests, measured)
                if earlier is None:
                    waiting.add(threads.submit(run, mutant, tests, complete))
                    continue
                result = earlier
            by_key[mutant.key] = result
            progress.advance(task)
        try:
            while waiting:
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for item in finished:
                    result = item.result()
                    results.add(result)
                    by_key[result.key] = result
                    progress.advance(task)
                counts = Counter(item.outcome for item in by_key.values())
                undetected = sum(counts[item] for item in UNDETECTED)
                progress.update(task, description=f"running mutants, {undetected} not detected")
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for tree in trees:
                tree.close()
            raise
    return by_key


def _report(
    config: Config,
    mutants: Sequence[Mutant],
    results: Mapping[str, Result],
    accepted: frozenset[Entry],
) -> int:
    """Print the table and the survivors; return 1 if there are too many."""
    by_module: dict[str, Counter[Outcome]] = defaultdict(Counter)
    survivors: list[Mutant] = []
    for mutant in sorted(mutants, key=lambda item: (item.module, item.at)):
        result = results[mutant.key]
        outcome = result.outcome
        if _entry(mutant) in accepted:
            if outcome in DETECTED:
                console.print(
                    f"accepted as equivalent, but detected by {result.killer}:", markup=False
                )
                _show(mutant, "")
            else:
                outcome = Outcome.ACCEPTED
        by_module[mutant.module][outcome] += 1
        if outcome in UNDETECTED:
            survivors.append(mutant)
            note = f"{result.ran} tests" if outcome is Outcome.SURVIVED else "no test runs the line"
            _show(mutant, note if result.complete else f"{note}, others exceed the time budget")
    table = Table(Column("module", overflow="fold"), *(item.value for item in COLUMNS))
    for module, counts in sorted(by_module.items()):
        table.add_row(module, *(str(counts[item] or "") for item in COLUMNS))
    total: Counter[Outcome] = sum(by_module.values(), Counter())
    table.add_section()
    table.add_row("all", *(str(total[item]) for item in COLUMNS))
    console.print(table)
    _write_survivors(survivors)
    total_count = len(mutants) - total[Outcome.ACCEPTED]
    share = len(survivors) / total_count if total_count else 0.0
    allowed = config.allowed_survivors
    console.print(
        f"{len(survivors)} of {total_count} not detected: {share:.1%}; "
        f"at most {allowed:.0%} are allowed"
    )
    return int(share > allowed)


def _show(mutant: Mutant, note: str) -> None:
    head = f"{mutant.module}:{mutant.at[0]} {mutant.operator}"
    console.print(
        f"[bold]{escape(head)}[/bold]{escape(f' ({note})' if note else '')}", soft_wrap=True
    )
    for line in mutant.diff.splitlines():
        style = "red" if line.startswith("-") else "green"
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _write_survivors(survivors: Sequence[Mutant]) -> None:
    """Write the survivors as entries for `equivalent.toml`, without a reason."""
    entries = []
    for item in survivors:
        values = zip(("module", "operator", "line", "becomes"), _entry(item), strict=True)
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values]
        entries.append(
            "\n".join([f"# line {item.at[0]}", "[[survivor]]", *lines, 'reason = ""', ""])
        )
    (STATE / "survivors.toml").write_text("\n".join(entries))


def _warn_of_outdated(root: Path, accepted: Sequence[Accepted]) -> None:
    """Print accepted survivors whose line no longer exists."""
    for entry in accepted:
        path = root / entry.module
        lines = path.read_text().splitlines() if path.is_file() else []
        if entry.line not in {line.strip() for line in lines}:
            console.print(
                f"equivalent.toml: {entry.module} has no line {entry.line!r}", markup=False
            )


def _entry(item: Mutant | Accepted) -> Entry:
    return item.module, item.operator, item.line, item.becomes


def _queue(trees: Sequence[Tree]) -> SimpleQueue[Tree]:
    queue: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        queue.put(tree)
    return queue


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


if __name__ == "__main__":
    sys.exit(main())
