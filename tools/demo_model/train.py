"""`python -m tools.demo_model.train PHASE --work FOLDER`: train the demo checkpoint."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tools.demo_model import drafting, export, phases
from tools.demo_model.loop import Work
from tools.demo_model.ranks import all_ranks
from workers.demo import CHECKPOINT

EXPORT: Final = "export"
PHASES: Final[dict[str, Callable[[Work], None]]] = {
    "tokenizer": phases.make_tokenizer,
    "eyes": phases.train_eyes,
    "text": phases.train_text,
    "join": phases.train_joined,
    "settle": phases.train_settle,
    "focus": phases.train_focus,
    "draft": drafting.train_draft,
}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.train", description=__doc__)
    parser.add_argument("phase", choices=(*PHASES, EXPORT, "all"))
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the files of the phases"
    )
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder of the export")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one phase, or all remaining phases in order."""
    options = _arguments(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    with all_ranks() as group:
        _train(options, group)
    if int(group.rank()) == 0 and options.phase in {EXPORT, "all"}:
        export.write_checkpoint(options.work, options.out)


def _train(options: argparse.Namespace, group: Any) -> None:
    is_leader = int(group.rank()) == 0
    progress = Progress(
        TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(), console=Console(), disable=not is_leader,
    )  # fmt: skip
    with progress:
        work = Work(options.work, progress, group)
        for name, run in PHASES.items():
            is_complete = options.phase == "all" and work.weights(name).exists()
            if options.phase in {name, "all"} and not is_complete:
                run(work)
                work.synchronise()


if __name__ == "__main__":
    main()
