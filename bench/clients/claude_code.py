"""Runs of Claude Code, for its programs."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from bench.clients.cases import KEY, MODEL, URL, check

_TIMEOUT_S = 900.0


def environment_of(key: str = KEY, **more: str) -> dict[str, str]:
    """Return the environment by which Claude Code finds the gateway and its model."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "API_TIMEOUT_MS": "600000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",
        "CLAUDE_CODE_MAX_RETRIES": "2",
        **more,
    }


def ask(prompt: str, *options: str, key: str = KEY, stdin: str = "", **more: str) -> dict[str, Any]:
    """Return the result of one run, however it ended; `more` is added to its environment."""
    process = subprocess.run(
        ["claude", "-p", prompt, *options, "--output-format", "json"],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=environment_of(key, **more),
        timeout=_TIMEOUT_S,
    )
    lines = process.stdout.splitlines()
    check(lines, process.stderr)
    result: dict[str, Any] = json.loads(lines[-1])
    return result
