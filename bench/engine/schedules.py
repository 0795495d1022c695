"""Thousands of random schedules of a lane, and random conversations; each token is checked.

`python -m bench.engine.schedules` runs the schedules of `tests/support/lane_schedules.py` and the
conversations of `tests/support/conversation_schedules.py`, prints their statistics, and stops at
the first wrong answer or count.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import Grid, provenance, write_page
from tests.support.conversation_schedules import ConversationRunner
from tests.support.lane_schedules import ScheduleRunner
from workers.demo import CHECKPOINT
from workers.engine.model.checkpoint import load_checkpoint
from workers.engine.prefix.files import fingerprint
from workers.engine.text.tokenizer import PromptRenderer

RESULTS: Final = Path(__file__).parents[1] / "results"
VARIETY: Final = 8
PROGRESS_INTERVAL: Final = 100
CACHE_BYTES: Final = 4 << 20


def run_schedules(model: Path, seed: int, count: int) -> ScheduleRunner:
    """Run schedules; raise AssertionError with the number of a schedule that fails."""
    checkpoint = load_checkpoint(model)
    schedules = ScheduleRunner(checkpoint, PromptRenderer(checkpoint.processor), seed, VARIETY)
    started_s = time.perf_counter()
    for number in range(count):
        try:
            schedules.run(number)
        except AssertionError as error:
            raise AssertionError(f"schedule {number} of seed {seed}: {error}") from error
        if (number + 1) % PROGRESS_INTERVAL == 0:
            elapsed_s = time.perf_counter() - started_s
            progress = f"{number + 1} schedules, {schedules.stats['rows']} rows, {elapsed_s:.0f} s"
            sys.stderr.write(progress + "\n")
    return schedules


def run_conversations(model: Path, seed: int, tokens: int) -> Counter[str]:
    """Answer random conversations; raise AssertionError at a token that is not the likeliest."""
    checkpoint = load_checkpoint(model)
    prompts = PromptRenderer(checkpoint.processor)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        runner = ConversationRunner(checkpoint, prompts, seed, CACHE_BYTES, Path(folder))
        try:
            return runner.run(tokens)
        finally:
            runner.close()


def conversation_table(stats: Counter[str]) -> Grid:
    """Return the statistics of the conversations."""
    lines = (
        ("answer tokens, each the likeliest of a new pass over prompt and answer", stats["tokens"]),
        ("... with another token equally likely within 1e-4", stats["ties"]),
        ("answers", stats["rows"]),
        ("... to a chat that forks from an earlier turn", stats["forks"]),
        ("... to a chat with a changed message", stats["edits"]),
        ("... to a chat without a former message", stats["cuts"]),
        ("... cancelled", stats["cancelled"]),
        ("evictions of a part of the cache", stats["evictions"]),
        ("restarts", stats["restarts"]),
        ("prompt tokens", stats["prompt tokens"]),
        ("... found in the cache", stats["cached tokens"]),
        ("... read from disk", stats["disk tokens"]),
        ("... from another engine", stats["moved tokens"]),
        ("draft tokens", stats["drafted tokens"]),
    )
    return Grid(
        title="Random conversations over the prefix caches of two engines",
        columns=("statistic", "count"),
        rows=tuple((name, f"{count:,}") for name, count in lines),
    )


def table(schedules: ScheduleRunner) -> Grid:
    """Return the statistics of the schedules."""
    stats, counts = schedules.stats, schedules.speculation
    lines = (
        ("schedules", stats["schedules"]),
        ("rows, each equal to its replay", stats["rows"]),
        ("... of them with sampling or penalties", stats["with rules"]),
        ("... cancelled", stats["cancelled"]),
        ("... ended by a stop string", stats["ended by string"]),
        ("... ended by the end token", stats["ended by token"]),
        ("... ended by their limit", stats["ended by limit"]),
        ("... ended inside a draft", stats["ended in draft"]),
        ("... started from a cached prefix", stats["from prefix cache"]),
        ("... continued plainly after an error of the head", stats["without head"]),
        ("... different from the replay at a tie within float noise", stats["near ties"]),
        ("tokens, each counted", stats["tokens"]),
        ("verifies", counts.steps),
        ("draft tokens attempted", counts.drafted),
        ("... accepted", counts.accepted),
        ("... accepted from prompt lookup", counts.accepted_by_source.get("lookup", 0)),
        ("... rejected", counts.rejected),
        ("... lost by errors", counts.errors),
    )
    return Grid(
        title="Random schedules, replayed",
        columns=("statistic", "count"),
        rows=tuple((name, f"{count:,}") for name, count in lines),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.schedules", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of the demo model")
    parser.add_argument("--count", type=int, default=2000, help="schedules to run")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of conversations")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.disable()  # heads that raise on purpose log many errors
    started_s = time.perf_counter()
    grid = table(run_schedules(options.model, options.seed, options.count))
    conversations = conversation_table(
        run_conversations(options.model, options.seed, options.tokens)
    )
    for each in (grid, conversations):
        Console(highlight=False).print(each.to_table())
    about = (
        f"{provenance()}, MLX {version('mlx')}, checkpoint {fingerprint(options.model)[:12]}; "
        f"seed {options.seed}, {time.perf_counter() - started_s:.0f} s. "
        "Rows join and leave at any step, on four lanes of different k, size, chunk and cache."
    )
    write_page(RESULTS / "schedules.md", "Random schedules", about, grid, conversations)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.schedules")
    main()
