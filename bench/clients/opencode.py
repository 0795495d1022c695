"""Settings and runs of opencode, for its programs."""

from __future__ import annotations

import json
from pathlib import Path

from bench.clients.agent import Agent
from bench.clients.cases import API, MODEL

PACKAGES = {
    "chat": "@ai-sdk/openai-compatible",
    "responses": "@ai-sdk/openai",
    "messages": "@ai-sdk/anthropic",
}
"""The packages inside opencode that speak each wire."""


def configure(output_tokens: int = 4_096) -> None:
    """Write the settings of opencode into its folder: a provider for each wire."""
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {f"paceline-{wire}": _provider(wire, output_tokens) for wire in PACKAGES},
        "autoupdate": False,
        "share": "disabled",
    }
    Path("opencode.json").write_text(json.dumps(config))


def agent(wire: str, *options: str, timeout_s: float = 300.0) -> Agent:
    """Return opencode on a wire."""
    model = f"paceline-{wire}/{MODEL}"
    return Agent(command=("opencode", "run", "--model", model, *options), timeout_s=timeout_s)


def _provider(wire: str, output_tokens: int) -> dict[str, object]:
    limit = {"context": 32_768, "output": output_tokens}
    return {
        "npm": PACKAGES[wire],
        "name": f"Paceline ({wire})",
        "options": {"baseURL": API, "apiKey": "{env:PACELINE_KEY}"},
        "models": {MODEL: {"name": MODEL, "limit": limit}},
    }
