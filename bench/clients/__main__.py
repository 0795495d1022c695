"""Unmodified third-party clients against a gateway with the demo model.

`python -m bench.clients` installs each client from PyPI in a virtual environment, starts `paceline
up` on a free port, runs the usual task of each client and prints its result.
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

from bench.clients.tools import TOOLS, Tool
from bench.clients.workspace import ClientFailed, Workspace
from bench.harness.tables import Grid
from bench.harness.venvs import PeerUnavailable, python_of
from tests.support.paceline_process import running_up
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results" / "clients.md"
_NAMES: Final = ",".join(tool.name for tool in TOOLS)


def run_tool(tool: Tool, venvs: Path, url: str, model: str) -> tuple[bool, str]:
    """Run one tool in a new folder; return whether it succeeded, and its result."""
    try:
        venv = tool.venv
        commands = python_of(venv, venvs).parent if venv else Path()
        with tempfile.TemporaryDirectory(prefix="paceline-client-") as folder:
            workspace = Workspace(url=url, model=model, checkpoint=CHECKPOINT, folder=Path(folder))
            return True, tool.run(commands, workspace)
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
    all_succeeded = True
    with (
        tempfile.TemporaryDirectory(prefix="paceline-clients-") as folder,
        running_up(Path(folder)) as process,
    ):
        for tool in tools:
            console.print(f"{tool.name}, installed if it is missing")
            succeeded, result = run_tool(
                tool, options.venv_dir.resolve(), process.url, process.model
            )
            all_succeeded &= succeeded
            rows.append(
                (
                    tool.name,
                    tool.version or "installed",
                    tool.task,
                    "yes" if succeeded else "NO",
                    result,
                )
            )
    grid = Grid(
        title="Third-party clients on the demo model",
        columns=("client", "version", "task", "works", "result"),
        rows=tuple(rows),
    )
    console.print(grid.to_table())
    if len(tools) == len(TOOLS):
        facts = (
            f"- run: {datetime.now(UTC).isoformat(timespec='minutes')}",
            f"- machine: {platform.system()} {platform.machine()}",
            f"- python: {platform.python_version()}",
        )
        RESULTS.write_text("\n".join(("## Clients\n", *facts, "", grid.to_markdown())))
    return 0 if all_succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
