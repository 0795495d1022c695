"""Settings and runs of Codex, for its programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.clients.agent import Agent
from bench.clients.cases import API, MODEL, command

_CONFIG = f"""\
model = "{MODEL}"
model_provider = "paceline"

[model_providers.paceline]
name = "Paceline"
base_url = "{API}"
wire_api = "responses"
env_key = "PACELINE_KEY"
"""
_LIKE = "gpt-5.5"
"""The model of its catalog whose abilities ours has: pictures, and a search for tools."""


def configure() -> None:
    """Write the settings of Codex into its home."""
    _folder().joinpath("config.toml").write_text(_CONFIG)


def configure_session(window: int, server: Path) -> None:
    """Write settings with the context of the model, its abilities and a server of tools."""
    [known] = [
        one
        for one in json.loads(command("codex", "debug", "models", "--bundled"))["models"]
        if one["slug"] == _LIKE
    ]
    catalog = _folder() / "models.json"
    catalog.write_text(json.dumps({"models": [{**known, "slug": MODEL}]}))
    paths = {"model_catalog_json": str(catalog), "model_context_window": window}
    lines = [f"{name} = {json.dumps(value)}" for name, value in paths.items()]
    tools = f"""
[mcp_servers.notes]
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(server))}]
"""
    _folder().joinpath("config.toml").write_text("\n".join([*lines, _CONFIG, tools]))


def agent(*options: str) -> Agent:
    """Return Codex, which reads its question after these options."""
    words = "codex exec --skip-git-repo-check --sandbox danger-full-access".split()
    return Agent(command=(*words, *options, "-"), timeout_s=900.0)


def _folder() -> Path:
    folder = Path.home() / ".codex"
    folder.mkdir(exist_ok=True)
    return folder
