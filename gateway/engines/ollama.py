"""Ollama: several models of one machine, loaded as they are requested.

By its published API description and source; not run here. It reports neither cached tokens nor
drafts, and supports no scopes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gateway.engines.base import Ask, EngineModel, EngineState, Question, named, object_of
from gateway.engines.openai import LocalEngine
from gateway.protocols.event_stream import count
from gateway.routing.features import Feature

_FEATURES = {"vision": Feature.IMAGE, "tools": Feature.TOOLS}
"""Names of abilities, and the features of requests that need them."""


class Ollama(LocalEngine):
    """A server of Ollama."""

    kind = "ollama"
    health = Question("/api/version")
    default_slots = 4
    no_models = "The engine lists no models. `ollama pull` downloads one."

    def __init__(self, *args: Any, **given: Any) -> None:
        self._abilities: dict[str, EngineModel | None] = {}
        """Answers of `/api/show` about the last listed models, by the digest of their weights."""
        super().__init__(*args, **given)

    async def ask_state(self, ask: Ask) -> EngineState:
        """List its models that chat, and which are in memory."""
        tags = (await ask(Question("/api/tags"))).admitted().objects("models")
        loaded = {one.get("name") for one in (await ask(Question("/api/ps"))).objects("models")}
        wanted = set(self._names.values())
        models = []
        known, self._abilities = self._abilities, {}
        for name, entry in named(tags, "name"):
            if wanted and wanted.isdisjoint((name, name.removesuffix(":latest"))):
                continue
            digest = str(entry.get("digest", ""))[:128]
            model = known[digest] if digest in known else await _ask_abilities(ask, name)
            if digest:
                self._abilities[digest] = known[digest] = model
            if model is not None:
                size = count(entry.get("size"))
                models.append(model._replace(name=name, loaded=name in loaded, size_bytes=size))
        return EngineState(tuple(models))

    def listed_as(self, name: str, listed: Collection[str]) -> str:
        """Return a listed name; one without a tag is the latest."""
        return next((one for one in (name, f"{name}:latest") if one in listed), "")


async def _ask_abilities(ask: Ask, name: str) -> EngineModel | None:
    """Return the capabilities of a model; None if it does not chat."""
    shown = (await ask(Question("/api/show", {"model": name}))).object()
    lacks = frozenset[Feature]()
    if isinstance(abilities := shown.get("capabilities"), list):
        if "completion" not in abilities:
            return None
        lacks = frozenset(one for ability, one in _FEATURES.items() if ability not in abilities)
    info = object_of(shown.get("model_info"))
    contexts = [count(info[key]) for key in info if key.endswith(".context_length")]
    return EngineModel(name, lacks, context_tokens=max(contexts, default=0))
