"""oMLX: several models of one Mac, loaded as they are requested.

By its published source; not run here.
"""

from __future__ import annotations

from gateway.engines.base import Ask, EngineModel, EngineState, Question, named
from gateway.engines.openai import LocalEngine
from gateway.protocols.event_stream import count
from gateway.routing.features import Feature
from gateway.routing.view import TAKES_ALL
from gateway.types import Json

_TEXT = frozenset((Feature.IMAGE, Feature.VIDEO, Feature.AUDIO))


class Omlx(LocalEngine):
    """A server of oMLX."""

    kind = "omlx"
    health = Question("/health")

    async def ask_state(self, ask: Ask) -> EngineState:
        """List its models that chat, and which are in memory."""
        state = await super().ask_state(ask)
        status = (await ask(Question("/v1/models/status"))).objects("models")
        # The list names a model by its alias.
        told: dict[str, Json] = {**dict(named(status)), **dict(named(status, "model_alias"))}
        models = []
        for model in state.models:
            entry = told.get(model.name, {})
            if (kind := entry.get("model_type", "")) not in ("llm", "vlm", ""):
                continue
            lacks, loaded = _TEXT if kind == "llm" else TAKES_ALL, bool(entry.get("loaded", True))
            size = count(entry.get("actual_size")) or count(entry.get("estimated_size"))
            context = count(entry.get("max_context_window")) or model.context_tokens
            models.append(EngineModel(model.name, lacks, loaded, size, context))
        return state._replace(models=tuple(models))
