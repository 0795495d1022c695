"""Thousands of random schedules of a lane, each row replayed alone, each token explained.

`python -m bench.engine.schedules` plays what `tests/support/lane_schedules.py` describes, prints
what they were made of, and ends at the first answer or count that is not as it must be.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import Grid
from tests.support.lane_schedules import ScheduleRunner
from tests.support.schedule_rows import ScheduleStats
from workers.demo import CHECKPOINT
from workers.engine.model import load_checkpoint
from workers.engine.prefix_cache_files import fingerprint
from workers.engine.tokenizer import PromptRenderer

RESULTS: Final = Path(__file__).parents[1] / "results"
VARIETY: Final = 8
TELL_EVERY: Final = 100


def play(model: Path, seed: int, count: int) -> ScheduleStats:
    """Play so many schedules; raise AssertionError, with the number of the schedule, at a fault."""
    checkpoint = load_checkpoint(model)
    schedules = ScheduleRunner(checkpoint, PromptRenderer(checkpoint.processor), seed, VARIETY)
    begun_s = time.perf_counter()
    for number in range(count):
        try:
            schedules.run(number)
        except AssertionError as error:
            raise AssertionError(f"schedule {number} of seed {seed}: {error}") from error
        if (number + 1) % TELL_EVERY == 0:
            spent_s = time.perf_counter() - begun_s
            progress = f"{number + 1} schedules, {schedules.stats.rows} rows, {spent_s:.0f} s"
            sys.stderr.write(progress + "\n")
    return schedules.stats


def table(found: ScheduleStats) -> Grid:
    """Return the statistics of the schedules."""
    counts = found.speculation
    lines = (
        ("schedules", found.schedules),
        ("rows, each equal to its replay alone", found.rows),
        ("... of them with sampling or penalties", found.with_rules),
        ("... cancelled", found.cancelled),
        ("... ended by a stop string", found.ended_by_string),
        ("... ended by the end token", found.ended_by_token),
        ("... ended by their limit", found.ended_by_limit),
        ("... ended inside a draft", found.ended_in_draft),
        ("... begun from a cached prefix", found.from_prefix_cache),
        ("... continued plainly after an error of the head", found.without_head),
        ("... different from the replay at a tie within float noise", found.near_ties),
        ("tokens, each counted", found.tokens),
        ("verifies", counts.steps),
        ("draft tokens attempted", counts.drafted),
        ("... accepted", counts.accepted),
        ("... rejected", counts.rejected),
        ("... lost by errors", counts.errors),
    )
    return Grid(
        title="Random schedules, replayed",
        columns=("what", "count"),
        rows=tuple((name, f"{count:,}") for name, count in lines),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.schedules", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of the demo model")
    parser.add_argument("--count", type=int, default=2000, help="schedules to play")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.disable()  # heads that raise on purpose have much to say
    begun_s = time.perf_counter()
    grid = table(play(options.model, options.seed, options.count))
    Console(highlight=False).print(grid.drawn())
    RESULTS.mkdir(exist_ok=True)
    about = (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.system()} {platform.machine()}, "
        f"MLX {version('mlx')}, checkpoint {fingerprint(options.model)[:12]}; "
        f"seed {options.seed}, {time.perf_counter() - begun_s:.0f} s. "
        "Rows join and leave at any step, on four lanes of different k, size, chunk and cache."
    )
    page = ["# Random schedules", about, grid.markdown()]
    (RESULTS / "schedules.md").write_text("\n\n".join(page).rstrip() + "\n")


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.schedules")
    main()
