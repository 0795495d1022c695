"""Runs of Codex, for its programs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.clients.cases import API, KEY, MODEL

TIMEOUT_S = 900.0
_CONFIG = f"""\
model = "{MODEL}"
model_provider = "paceline"

[model_providers.paceline]
name = "Paceline"
base_url = "{API}"
wire_api = "responses"
env_key = "PACELINE_KEY"
"""


@contextlib.contextmanager
def running(question: str, *options: str, key: str = KEY) -> Iterator[subprocess.Popen[str]]:
    """Run `codex exec` in this folder, which is its home."""
    folder = Path.home() / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(_CONFIG)
    words = ["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    process = subprocess.Popen(
        [*words, *options, "-"],
        env={"PATH": os.environ["PATH"], "HOME": str(Path.home()), "PACELINE_KEY": key},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(question)
    process.stdin.close()
    process.stdin = None
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def codex(question: str, *options: str, key: str = KEY) -> str:
    """Return what Codex prints."""
    with running(question, *options, key=key) as process:
        return process.communicate(timeout=TIMEOUT_S)[0]
