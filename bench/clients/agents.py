"""Agents for coding as commands: their settings, and runs of them, for their programs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.clients.cases import (
    API,
    KEY,
    MODEL,
    SLOWLY,
    URL,
    check,
    command,
    leave,
    requests_running,
    wait_until,
)
from bench.harness.processes import exit_at_sigterm, kill_session

PACKAGES = {
    "chat": "@ai-sdk/openai-compatible",
    "responses": "@ai-sdk/openai",
    "messages": "@ai-sdk/anthropic",
}
"""The packages inside opencode that speak each wire."""
_CODEX = f"""\
model = "{MODEL}"
model_provider = "paceline"

[model_providers.paceline]
name = "Paceline"
base_url = "{API}"
wire_api = "responses"
env_key = "PACELINE_KEY"
"""
_LIKE = "gpt-5.5"
"""The model of Codex's catalog whose abilities ours has: pictures, and a search for tools."""


def _keys(key: str) -> dict[str, str]:
    return {"PACELINE_KEY": key}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent that takes its question from standard input, and whose home is this folder."""

    command: tuple[str, ...]
    timeout_s: float = 900.0
    environment: Callable[[str], Mapping[str, str]] = field(default=_keys)
    """Function from an API key to what it reads of its environment."""

    def ask(self, question: str, key: str = KEY) -> str:
        with self._running(question, key) as process:
            return process.communicate(timeout=self.timeout_s)[0]

    def interrupt(self) -> str:
        """Interrupt the agent while the worker answers; return what the gateway counts."""

        def interrupt() -> None:
            with self._running(SLOWLY, KEY) as process:
                wait_until(lambda: requests_running() > 0)
                os.killpg(process.pid, signal.SIGINT)
                process.communicate(timeout=self.timeout_s)

        return leave(interrupt)

    @contextlib.contextmanager
    def _running(self, question: str, key: str) -> Iterator[subprocess.Popen[str]]:
        exit_at_sigterm()
        base = {"PATH": os.environ["PATH"], "HOME": str(Path.home())}
        process = subprocess.Popen(
            self.command,
            env={**base, **self.environment(key)},
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
            kill_session(process.pid)
            process.wait()


def events_of(printed: str) -> list[dict[str, Any]]:
    """Return the events that an agent prints as lines of JSON."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def claude_code(*options: str, **more: str) -> Agent:
    """Return Claude Code, which finds the gateway and its model by its environment."""

    def environment(key: str) -> dict[str, str]:
        names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
        return {
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_AUTH_TOKEN": key,
            **dict.fromkeys(names, MODEL),
            "API_TIMEOUT_MS": "600000",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",
            "CLAUDE_CODE_MAX_RETRIES": "2",
            **more,
        }

    words = ("claude", "-p", *options, "--output-format", "json")
    return Agent(command=words, environment=environment)


def ask_claude(question: str, *options: str, key: str = KEY, **more: str) -> dict[str, Any]:
    """Return the result of one run, however it ended."""
    found = events_of(claude_code(*options, **more).ask(question, key))
    check(found, "it printed no result")
    return found[-1]


def configure_codex(window: int = 0, server: Path | None = None) -> None:
    """Write the settings of Codex into its home.

    For a session they have the context of the model, its abilities and a server of tools.
    """
    folder = Path.home() / ".codex"
    folder.mkdir(exist_ok=True)
    lines, tools = [], ""
    if server is not None:
        models = json.loads(command("codex", "debug", "models", "--bundled"))["models"]
        [known] = [one for one in models if one["slug"] == _LIKE]
        catalog = folder / "models.json"
        catalog.write_text(json.dumps({"models": [{**known, "slug": MODEL}]}))
        paths = {"model_catalog_json": str(catalog), "model_context_window": window}
        lines = [f"{name} = {json.dumps(value)}" for name, value in paths.items()]
        arguments = f"command = {json.dumps(sys.executable)}\nargs = [{json.dumps(str(server))}]"
        tools = f"\n[mcp_servers.notes]\n{arguments}\n"
    (folder / "config.toml").write_text("\n".join([*lines, _CODEX, tools]))


def codex(*options: str) -> Agent:
    """Return Codex, which reads its question after these options."""
    words = "codex exec --skip-git-repo-check --sandbox danger-full-access".split()
    return Agent(command=(*words, *options, "-"))


def configure_opencode(output_tokens: int = 4_096) -> None:
    """Write the settings of opencode into its folder: a provider for each wire."""
    limit = {"context": 32_768, "output": output_tokens}
    providers = {
        f"paceline-{wire}": {
            "npm": package,
            "name": f"Paceline ({wire})",
            "options": {"baseURL": API, "apiKey": "{env:PACELINE_KEY}"},
            "models": {MODEL: {"name": MODEL, "limit": limit}},
        }
        for wire, package in PACKAGES.items()
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": providers,
        "autoupdate": False,
        "share": "disabled",
    }
    Path("opencode.json").write_text(json.dumps(config))


def opencode(wire: str, *options: str, timeout_s: float = 300.0) -> Agent:
    model = f"paceline-{wire}/{MODEL}"
    return Agent(command=("opencode", "run", "--model", model, *options), timeout_s=timeout_s)
