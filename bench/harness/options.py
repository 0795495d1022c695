"""The options that benchmarks have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from workers.demo import CHECKPOINT

CACHE: Final = Path.home() / ".cache" / "paceline-bench"
"""Folder of environments and logs, and of what benchmarks download."""


def parser(
    module: str, description: str | None, *, quick: bool = True, model: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with the folder of a benchmark, which exists afterwards."""

    def folder(path: str) -> Path:
        resolved = Path(path).expanduser().resolve()
        resolved.mkdir(parents=True, exist_ok=True)
        return resolved

    made = argparse.ArgumentParser(prog=f"python -m bench.{module}", description=description)
    # The default is a string, so that it is converted.
    made.add_argument("--folder", type=folder, default=str(CACHE), help="environments and logs")
    if quick:
        about = "check that everything runs; write no results"
        made.add_argument("--quick", action="store_true", help=about)
    if model:
        made.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of the model")
    return made


def peers_option(made: argparse.ArgumentParser, names: list[str]) -> None:
    """Add `--peers`: names of peers, all by default."""

    def chosen(text: str) -> list[str]:
        return [name for name in names if name in text.split(",")]

    about = f"comma-separated, may be empty ({','.join(names)})"
    made.add_argument("--peers", type=chosen, default=names, help=about)
