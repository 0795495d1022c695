"""A static worker, as an admin configures it."""

from typing import Any

from gateway.config.static_workers import StaticWorker
from gateway.engines.openai import OpenAIEngine
from gateway.fleet.engine_watch import WatchedEngine

ENTRY: dict[str, Any] = {
    "id": "studio",
    "kind": "openai",
    "url": "http://127.0.0.1:9200",
    "models": ["demo"],
    "pools": ["text-mtp", "vlm"],
    "slots": 8,
}


def static_worker(**changes: Any) -> StaticWorker:
    return StaticWorker.model_validate({**ENTRY, **changes})


def watched_engine(**changes: Any) -> WatchedEngine:
    """Return the static worker of `ENTRY` with these changes, found out as an OpenAI server."""
    entry = static_worker(**changes)
    return WatchedEngine(entry=entry, engine=OpenAIEngine("", entry.names))
