"""Settings and runs of Codex, for its programs."""

from __future__ import annotations

from pathlib import Path

from bench.clients.agent import Agent
from bench.clients.cases import API, MODEL

_CONFIG = f"""\
model = "{MODEL}"
model_provider = "paceline"

[model_providers.paceline]
name = "Paceline"
base_url = "{API}"
wire_api = "responses"
env_key = "PACELINE_KEY"
"""


def configure() -> None:
    """Write the settings of Codex into its home."""
    folder = Path.home() / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(_CONFIG)


def agent(*options: str) -> Agent:
    """Return Codex, which reads its question after these options."""
    command = "codex exec --skip-git-repo-check --sandbox danger-full-access".split()
    return Agent(command=(*command, *options, "-"), timeout_s=900.0)
