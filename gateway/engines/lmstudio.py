"""LM Studio: several models of one Mac, loaded as they are requested.

By its published API description (REST API v1, and v0 of older versions); not run here. It reports
no cached tokens and supports no scopes.
"""

from __future__ import annotations

from gateway.engines.base import Ask, EngineModel, EngineState, Question, named, object_of, objects
from gateway.engines.openai import LocalEngine
from gateway.engines.refusals import OVERFLOW_MESSAGE, Phrase
from gateway.errors import CONTEXT_OVERFLOW
from gateway.protocols.event_stream import count
from gateway.routing.features import Feature
from gateway.routing.view import TAKES_ALL

OLDER_MODELS = Question("/api/v0/models")
_NO_PICTURES = frozenset((Feature.IMAGE,))


class LmStudio(LocalEngine):
    """The server of LM Studio."""

    kind = "lmstudio"
    default_slots = 4
    phrases = (
        Phrase(
            "greater than the context length|initial prompt",
            OVERFLOW_MESSAGE,
            "messages",
            CONTEXT_OVERFLOW,
        ),
    )
    spellings = (*LocalEngine.spellings, ("repetition_penalty", "repeat_penalty"))
    no_models = "The engine lists no models. Download one there."

    async def ask_state(self, ask: Ask) -> EngineState:
        """List its models that chat, and which are in memory."""
        models, parallel = [], [0]
        newer = (await ask(Question("/api/v1/models"))).admitted().objects("models")
        for name, entry in named(newer, "key"):
            if entry.get("type") != "llm":
                continue
            sees = object_of(entry.get("capabilities")).get("vision") is True
            running = objects(entry.get("loaded_instances"))
            parallel += [count(object_of(one.get("config")).get("parallel")) for one in running]
            size, context = count(entry.get("size_bytes")), count(entry.get("max_context_length"))
            lacks = TAKES_ALL if sees else _NO_PICTURES
            models.append(EngineModel(name, lacks, bool(running), size, context))
        if not newer:
            for name, entry in named((await ask(OLDER_MODELS)).objects()):
                if (kind := entry.get("type")) not in ("llm", "vlm"):
                    continue
                context = count(entry.get("loaded_context_length"))
                context = context or count(entry.get("max_context_length"))
                lacks = TAKES_ALL if kind == "vlm" else _NO_PICTURES
                loaded = entry.get("state") != "not-loaded"
                models.append(EngineModel(name, lacks, loaded, context_tokens=context))
        return EngineState(tuple(models), max(parallel) or None)
