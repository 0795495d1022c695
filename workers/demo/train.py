"""`python -m workers.demo.train PHASE --work FOLDER`: make the demo checkpoint from nothing."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from workers.demo import CHECKPOINT, blend, drafting, export, phases
from workers.demo.loop import Work

PHASES: Final = (
    "tokenizer", "eyes", "text", "join", "sight", "polish", "focus", "draft", "mtp", "settle",
    "blend", "export",
)  # fmt: skip


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.demo.train", description=__doc__)
    parser.add_argument("phase", choices=(*PHASES, "all"))
    parser.add_argument("--work", type=Path, required=True, help="folder for what phases leave")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder of the export")
    parser.add_argument("--pictures", type=int, default=3000, help="pictures drawn before a phase")
    parser.add_argument("--eyes-steps", type=int, default=2600)
    parser.add_argument("--text-steps", type=int, default=1500)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one phase, or all in order."""
    options = _arguments(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    progress = Progress(
        TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(), console=Console(),
    )  # fmt: skip
    runs: dict[str, Callable[[Work], None]] = {
        "tokenizer": phases.make_tokenizer,
        "eyes": lambda work: phases.train_eyes(work, options.eyes_steps),
        "text": lambda work: phases.train_text(work, options.text_steps),
        "join": phases.train_joined,
        "sight": phases.train_sight,
        "polish": phases.train_polish,
        "focus": phases.train_focus,
        "draft": drafting.train_draft,
        "mtp": drafting.train_mtp,
        "settle": phases.train_settle,
        "blend": blend.blend,
    }
    with progress:
        work = Work(options.work, progress, options.pictures)
        for phase in PHASES if options.phase == "all" else (options.phase,):
            if phase == "export":
                export.write_checkpoint(options.work, options.out)
            else:
                runs[phase](work)


if __name__ == "__main__":
    main()
