# /// script
# [tool.paceline]
# npm = ["@anthropic-ai/claude-code@2.1.197", "node@22.23.3"]
# ///
"""Claude Code, on Anthropic's Messages: the demo model, and a scripted model that calls tools."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

from bench.clients.cases import MODEL, ONCE, SCRIPTED_MODEL, URL, Mode, case, check, get, main
from bench.clients.scripted_engine import ECHO, NOTE, Ask

ENVIRONMENT = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",
    "CLAUDE_CODE_MAX_RETRIES": "1",
    "API_TIMEOUT_MS": "600000",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "PATH": os.environ["PATH"],
    "HOME": os.environ["HOME"],
}


def words(model: str, prompt: str, *options: str) -> tuple[list[str], dict[str, str]]:
    models = {"ANTHROPIC_MODEL": model, "ANTHROPIC_SMALL_FAST_MODEL": model}
    return ["claude", "-p", prompt, *options, "--output-format", "json"], ENVIRONMENT | models


def ask(model: str, prompt: str, *options: str) -> dict[str, Any]:
    """Return the result of one run, however it ended."""
    command, environment = words(model, prompt, *options)
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


@case("asks the demo model with two tools, then twice more: what is read again", ONCE)
def conversation(_: Mode) -> str:
    session, shares, read = str(uuid.uuid4()), [], 0
    for turn, number in enumerate((5, 6, 7)):
        where = ("--resume", session) if turn else ("--session-id", session)
        result = ask(MODEL, f"Count from 1 to {number}.", "--tools", "Read,Bash", *where)
        check(not result["is_error"] and "1, 2, 3" in result["result"], result["result"])
        usage = result["usage"]
        if turn:
            shares.append(usage["cache_read_input_tokens"] / read)
        read = sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens"))
        read += usage["output_tokens"]
    check(min(shares) >= 0.95, shares)
    found = ", ".join(f"{share:.1%}" for share in shares)
    return f"{read:,} tokens in the end; of the earlier ones found again: {found}"


@case("all of its tools do not fit into the demo's context", ONCE)
def overflow(_: Mode) -> str:
    result = ask(MODEL, "Count from 1 to 5.")
    check(result["is_error"] and result["result"].startswith("Prompt is too long"), result)
    return str(result["result"])[:100]


@case("a loop of its own tools: reads a file, runs a command, answers", ONCE)
def tools(_: Mode) -> str:
    Path(NOTE).write_text("the secret is 42")
    result = ask(SCRIPTED_MODEL, "Read the note, then echo.", "--allowedTools", "Read,Bash")
    text = result["result"]
    check("the secret is 42" in text and ECHO.split()[-1] in text, text)
    return f"{result['num_turns']} turns: {text}"


@case("a worker that is busy: it tries again, then tells the error", ONCE)
def busy(_: Mode) -> str:
    result = ask(SCRIPTED_MODEL, Ask.BUSY)
    check(result["is_error"], result)
    return str(result["result"])[:150]


@case("the context of the model is full", ONCE)
def full(_: Mode) -> str:
    result = ask(SCRIPTED_MODEL, Ask.OVERFLOW)
    check(result["is_error"] and "too long" in result["result"], result)
    return str(result["result"])[:100]


@case("is interrupted: the worker's row is free again", ONCE)
def interrupted(_: Mode) -> str:
    command, environment = words(SCRIPTED_MODEL, Ask.SLOW, "--tools", "")
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        check(_running(1), "the request never ran")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    check(_running(0), "the request runs on")
    return "no request runs after the interrupt"


def _running(count: int) -> bool:
    """Wait until so many requests run on the scripted worker."""
    for _ in range(300):
        status = json.loads(get("/v1/status"))
        lanes = [
            lane
            for worker in status["workers"].values()
            if worker["model"] == SCRIPTED_MODEL
            for lane in worker["lanes"].values()
        ]
        if any(lane["in_flight"] for lane in lanes) == bool(count):
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    main()
