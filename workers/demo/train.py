"""`python -m workers.demo.train PHASE --work FOLDER`: make the demo checkpoint from nothing."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from workers.demo import CHECKPOINT, drafting, export, phases
from workers.demo.loop import Work

EXPORT: Final = "export"
PHASES: Final[dict[str, Callable[[Work], None]]] = {
    "tokenizer": phases.make_tokenizer,
    "eyes": phases.train_eyes,
    "text": phases.train_text,
    "join": phases.train_joined,
    "sight": phases.train_sight,
    "polish": phases.train_polish,
    "focus": phases.train_focus,
    "settle": phases.train_settle,
    "endings": phases.train_endings,
    "draft": drafting.train_draft,
    "mtp": drafting.train_mtp,
}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.demo.train", description=__doc__)
    parser.add_argument("phase", choices=(*PHASES, EXPORT, "all"))
    parser.add_argument("--work", type=Path, required=True, help="folder for what phases leave")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder of the export")
    parser.add_argument("--pictures", type=int, default=3000, help="pictures drawn before a phase")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one phase, or all in order."""
    options = _arguments(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    progress = Progress(
        TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(), console=Console(),
    )  # fmt: skip
    with progress:
        work = Work(options.work, progress, options.pictures)
        for name, run in PHASES.items():
            if options.phase in {name, "all"}:
                run(work)
    if options.phase in {EXPORT, "all"}:
        export.write_checkpoint(options.work, options.out)


if __name__ == "__main__":
    main()
