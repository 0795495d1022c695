"""Thousands of random schedules of a lane, and random conversations; each token is checked.

`python -m bench.engine.schedules` runs the schedules of `tests/support/lane_schedules.py` and the
conversations of `tests/support/conversation_schedules.py`, prints their statistics, and stops at
the first wrong answer or count.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from bench.harness.blas import restart_with_fast_blas
from bench.harness.options import parser
from bench.harness.tables import Grid, provenance, report
from tests.support.conversation_schedules import ConversationRunner
from tests.support.lane_schedules import ScheduleRunner
from workers.engine.model.checkpoint import load_checkpoint
from workers.engine.prefix.fingerprint import ModelFiles
from workers.engine.text.tokenizer import PromptRenderer

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


_OF_CONVERSATIONS: Final = {
    "answer tokens, each the likeliest of a new pass over prompt and answer": "tokens",
    "... with another token equally likely within 1e-4": "ties",
    "answers": "rows",
    "... to a chat that forks from an earlier turn": "forks",
    "... to a chat with a changed message": "edits",
    "... to a chat without a former message": "cuts",
    "... cancelled": "cancelled",
    "evictions of a part of the cache": "evictions",
    "restarts": "restarts",
    "prompt tokens": "prompt tokens",
    "... found in the cache": "cached tokens",
    "... read from disk": "disk tokens",
    "... from another engine": "moved tokens",
    "draft tokens": "drafted tokens",
}
_OF_SCHEDULES: Final = {
    "schedules": "schedules",
    "rows, each equal to its replay": "rows",
    "... of them with sampling or penalties": "with rules",
    "... cancelled": "cancelled",
    "... ended by a stop string": "ended by string",
    "... ended by the end token": "ended by token",
    "... ended by their limit": "ended by limit",
    "... ended inside a draft": "ended in draft",
    "... started from a cached prefix": "from prefix cache",
    "... continued plainly after an error of the head": "without head",
    "... different from the replay at a tie within float noise": "near ties",
    "tokens, each counted": "tokens",
}


def statistics_table(title: str, lines: Mapping[str, int]) -> Grid:
    return Grid(title, ("statistic", "count"), [(name, f"{n:,}") for name, n in lines.items()])


def main() -> None:
    made = parser("engine.schedules", __doc__, quick=False, model=True)
    made.add_argument("--count", type=int, default=2000, help="schedules to run")
    made.add_argument("--tokens", type=int, default=100_000, help="tokens of conversations")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--most-ties", type=float, default=1.0, help="share of rows that may differ")
    options = made.parse_args()
    logging.disable()  # heads that raise on purpose log many errors
    started_s = time.perf_counter()
    ran = run_schedules(options.model, options.seed, options.count)
    counts = ran.speculation
    lines = {name: ran.stats[key] for name, key in _OF_SCHEDULES.items()} | {
        "verifies": counts.steps,
        "draft tokens attempted": counts.drafted,
        "... accepted": counts.accepted,
        "... accepted from prompt lookup": counts.accepted_by_source.get("lookup", 0),
        "... rejected": counts.rejected,
        "... lost by errors": counts.errors,
    }
    stats = run_conversations(options.model, options.seed, options.tokens)
    conversations = {name: stats[key] for name, key in _OF_CONVERSATIONS.items()}
    title = "Random conversations over the prefix caches of two engines"
    grids = (
        statistics_table("Random schedules, replayed", lines),
        statistics_table(title, conversations),
    )
    known = ModelFiles(options.model).read()
    assert known is not None
    about = (
        f"{provenance()}, MLX {version('mlx')}, checkpoint {known.caches[:12]}; "
        f"seed {options.seed}, {time.perf_counter() - started_s:.0f} s. "
        "Rows join and leave at any step, on four lanes of different k, size, chunk and cache."
    )
    report("schedules.md", "Random schedules", about, *grids)
    if ran.stats["near ties"] > options.most_ties * ran.stats["rows"]:
        sys.exit("Too few answers are equal to those of a row alone.")


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.schedules")
    main()
