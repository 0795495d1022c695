"""`llama-server` of llama.cpp: each answer reports slots, drafts and cached tokens.

By its published API description, and recorded from the one in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from gateway.engines.base import (
    Ask,
    EngineModel,
    EngineState,
    Isolation,
    Question,
    named,
    object_of,
)
from gateway.engines.openai import MODELS, LocalEngine
from gateway.protocols.event_stream import count
from gateway.routing.features import Feature
from gateway.types import Json

_LOADED = (None, "loaded", "sleeping")
"""A server with one model does not report it."""
_MODALITIES = {"vision": Feature.IMAGE, "audio": Feature.AUDIO}


class LlamaCpp(LocalEngine):
    """A `llama-server`, of one model or as a router of several."""

    kind = "llama.cpp"
    health = Question("/health")
    default_slots = 4
    isolation = Isolation.NO_REUSE
    spellings = (*LocalEngine.spellings, ("repetition_penalty", "repeat_penalty"))
    no_models = "The engine lists no models."

    async def ask_state(self, ask: Ask) -> EngineState:
        """List its models, the media that they take and the slots."""
        listed = named((await ask(MODELS)).admitted().objects())
        props = (await ask(Question("/props"))).object()
        lacks = frozenset[Feature]()
        if isinstance(told := props.get("modalities"), dict):
            lacks = frozenset(
                feature for name, feature in _MODALITIES.items() if told.get(name) is not True
            )
        context = count(object_of(props.get("default_generation_settings")).get("n_ctx"))
        models = []
        for name, entry in listed:
            status, meta = object_of(entry.get("status")), object_of(entry.get("meta"))
            loaded = status.get("value") in _LOADED
            context_tokens = context or count(meta.get("n_ctx_train"))
            models.append(EngineModel(name, lacks, loaded, count(meta.get("size")), context_tokens))
        return EngineState(tuple(models), count(props.get("total_slots")) or None)

    def adapt(self, fields: Json) -> None:
        """Let it read a prompt again that another isolation scope may have sent."""
        if self._mixes_scopes:
            fields["cache_prompt"] = False
