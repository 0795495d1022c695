"""Other people's clients, unmodified, on a line that runs the demo model.

`python -m bench.clients` installs each from PyPI in a virtual environment of its own, starts
`paceline up` on a free port, has each do what people use it for, and prints what it said.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.clients.place import ClientFailed, Place
from bench.clients.tools import TOOLS, Tool
from bench.harness.tables import Grid
from bench.harness.venvs import PeerUnavailable, python_of
from tests.support.paceline_process import running_up
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results" / "clients.md"
_NAMES: Final = ",".join(tool.name for tool in TOOLS)


def use(tool: Tool, venvs: Path, url: str, model: str) -> tuple[bool, str]:
    """Have one tool work in a folder of its own; say whether it did, and what it said."""
    try:
        venv = tool.venv
        commands = python_of(venv, venvs).parent if venv else Path()
        with tempfile.TemporaryDirectory(prefix="paceline-client-") as folder:
            place = Place(url=url, model=model, checkpoint=CHECKPOINT, folder=Path(folder))
            return True, tool.use(commands, place)
    except (ClientFailed, PeerUnavailable) as reason:
        return False, str(reason)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    add = parser.add_argument
    add("--clients", default=_NAMES, help=f"comma-separated; all of them write {RESULTS.name}")
    add("--venv-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    options = parser.parse_args(arguments)
    tools = [tool for tool in TOOLS if tool.name in options.clients.split(",")]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    rows: list[tuple[str, ...]] = []
    worked = True
    with (
        tempfile.TemporaryDirectory(prefix="paceline-clients-") as folder,
        running_up(Path(folder)) as line,
    ):
        for tool in tools:
            console.print(f"{tool.name}, installed where it is missing")
            did, said = use(tool, options.venv_dir.resolve(), line.url, line.model)
            worked &= did
            rows.append(
                (tool.name, tool.version or "as found", tool.does, "yes" if did else "NO", said)
            )
    grid = Grid(
        title="Other people's clients on the demo model",
        columns=("client", "version", "does", "works", "said"),
        rows=tuple(rows),
    )
    console.print(grid.drawn())
    if len(tools) == len(TOOLS):
        facts = (
            f"- run: {datetime.now(UTC).isoformat(timespec='minutes')}",
            f"- machine: {platform.system()} {platform.machine()}",
            f"- python: {platform.python_version()}",
        )
        RESULTS.write_text("\n".join(("## Clients\n", *facts, "", grid.markdown())))
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main())
