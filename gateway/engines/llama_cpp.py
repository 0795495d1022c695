"""`llama-server` of llama.cpp: slots, drafts and cached tokens told in each answer.

By its published API description, and recorded from the one in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.base import (
    Ask,
    EngineModel,
    EngineState,
    EngineUnusable,
    HttpAnswer,
    Isolation,
    Question,
    count,
    model_name,
    objects,
)
from gateway.engines.local import LocalEngine, drafts_of_timings
from gateway.protocols.engine_answer import FORMS
from gateway.protocols.event_stream import fact_pattern, read_usage
from gateway.routing.features import Feature
from gateway.types import Usage

_PROPS = Question("/props")
_LOADED = (None, "loaded", "sleeping")
"""A server of one model does not tell."""


def _usage(answer: Mapping[str, Any]) -> Usage | None:
    """Read the usage; the cached tokens of older versions stand in `timings`."""
    usage, timings = read_usage(answer), answer.get("timings")
    if usage is None or usage.cached_known or not isinstance(timings, dict):
        return usage
    if timings.get("cache_n") is None:
        return usage
    cached = min(count(timings["cache_n"]), usage.prompt_tokens)
    return usage._replace(cached_tokens=cached, cached_known=True)


class LlamaCpp(LocalEngine):
    """A `llama-server`, of one model or as a router of several."""

    kind = "llama.cpp"
    health = Question("/health")
    lacks = frozenset(
        (
            *(Feature.VIDEO, Feature.FILE, Feature.PROMPTS, Feature.ECHO, Feature.STOP_TOKENS),
            *(Feature.MIN_TOKENS, Feature.TRUNCATION, Feature.CONTINUATION),
            *(Feature.EXACT, Feature.CALLS),
        )
    )
    default_slots = 4
    facts = fact_pattern(*FORMS, "timings")
    usage = staticmethod(_usage)
    drafts = staticmethod(drafts_of_timings)
    isolation = Isolation.NO_REUSE

    @classmethod
    def is_sign(cls, answer: HttpAnswer) -> bool:
        """Return whether the models are those of llama.cpp."""
        return answer.headers.get("server", "") == "llama.cpp" or any(
            one.get("owned_by") == "llamacpp" for one in objects(answer.object().get("data"))
        )

    async def read(self, ask: Ask) -> EngineState:
        """List its models, the media that they take and the slots."""
        answer = (await ask(Question(self.models_path))).admitted()
        props = (await ask(_PROPS)).object()
        modalities = props.get("modalities")
        lacks = set[Feature]()
        if isinstance(modalities, dict):
            lacks |= {Feature.IMAGE} if modalities.get("vision") is not True else set()
            lacks |= {Feature.AUDIO} if modalities.get("audio") is not True else set()
        settings = props.get("default_generation_settings")
        context = count(settings.get("n_ctx")) if isinstance(settings, dict) else 0
        models = [
            EngineModel(
                name,
                frozenset(lacks),
                loaded=_object(entry, "status").get("value") in _LOADED,
                size_bytes=count(_object(entry, "meta").get("size")),
                context_tokens=context or count(_object(entry, "meta").get("n_ctx_train")),
            )
            for entry in objects(answer.object().get("data"))
            if (name := model_name(entry.get("id")))
        ]
        if not models and not self._names:
            raise EngineUnusable("The engine lists no models.")
        return EngineState(tuple(models), count(props.get("total_slots")) or None)

    def adapt(self, fields: dict[str, Any], salt: str) -> None:
        """Spell the limit and the penalty as it does, and isolate scopes."""
        super().adapt(fields, salt)
        if "repetition_penalty" in fields:
            fields["repeat_penalty"] = fields.pop("repetition_penalty")
        if self.serves_another_scope(salt):
            fields["cache_prompt"] = False


def _object(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = entry.get(name)
    return value if isinstance(value, dict) else {}
