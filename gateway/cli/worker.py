"""`paceline worker`: become a worker process; its options are its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

HELP = "serve a model on this machine (`paceline worker --help` lists its options)"


def become_worker(arguments: Sequence[str]) -> NoReturn:
    """Replace this process: the gateway's code and an engine's never share one."""
    os.execv(sys.executable, [sys.executable, "-m", "workers", *arguments])  # noqa: S606 - no shell
