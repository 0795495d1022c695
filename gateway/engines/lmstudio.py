"""LM Studio: several models of one Mac, loaded as they are requested.

By its published API description (REST API v1, and v0 of older versions); not run here.
"""

from __future__ import annotations

from typing import Any

from gateway.engines.base import (
    Ask,
    EngineModel,
    EngineState,
    EngineUnusable,
    HttpAnswer,
    Question,
    count,
    model_name,
    objects,
)
from gateway.engines.local import LocalEngine
from gateway.engines.refusals import OVERFLOW_MESSAGE, phrase
from gateway.errors import CONTEXT_OVERFLOW
from gateway.routing.features import Feature
from gateway.routing.view import TAKES_ALL

_V0 = Question("/api/v0/models")
_V1 = Question("/api/v1/models")
_NO_PICTURES = frozenset((Feature.IMAGE,))


class LmStudio(LocalEngine):
    """The server of LM Studio. It tells no cached tokens and knows no scopes."""

    kind = "lmstudio"
    sign = _V0
    lacks = frozenset(
        (
            *(Feature.EXACT, Feature.VIDEO, Feature.AUDIO, Feature.FILE, Feature.CHOICES),
            *(Feature.PROMPTS, Feature.ECHO, Feature.LOGPROBS, Feature.STOP_TOKENS),
            *(Feature.MIN_TOKENS, Feature.IGNORE_EOS, Feature.TRUNCATION),
            *(Feature.CONTINUATION, Feature.THINKING_BUDGET, Feature.MIN_P, Feature.CALLS),
        )
    )
    default_slots = 4
    phrases = (
        phrase(
            "greater than the context length|initial prompt",
            OVERFLOW_MESSAGE,
            "messages",
            CONTEXT_OVERFLOW,
        ),
    )

    @classmethod
    def is_sign(cls, answer: HttpAnswer) -> bool:
        """Return whether the models have fields that only LM Studio lists."""
        return any("compatibility_type" in one for one in objects(answer.object().get("data")))

    async def read(self, ask: Ask) -> EngineState:
        """List its models that chat, and which are in memory."""
        newer = (await ask(_V1)).admitted()
        if models := objects(newer.object().get("models")):
            models = [one for one in models if one.get("type") == "llm"]
            found = [_model(one) for one in models]
            parallel = [
                count(one["config"].get("parallel"))
                for model in models
                for one in objects(model.get("loaded_instances"))
                if isinstance(one.get("config"), dict)
            ]
            state = EngineState(
                tuple(model for model in found if model.name), max(parallel, default=0) or None
            )
        else:
            listed = objects((await ask(_V0)).object().get("data"))
            older = [_older_model(one) for one in listed if one.get("type") in ("llm", "vlm")]
            state = EngineState(tuple(model for model in older if model.name))
        if not state.models and not self._names:
            raise EngineUnusable("The engine lists no models; download one there.")
        return state

    def adapt(self, fields: dict[str, Any], salt: str) -> None:
        """Limit the answer, and penalise repetition, by the fields that it knows."""
        super().adapt(fields, salt)
        if "repetition_penalty" in fields:
            fields["repeat_penalty"] = fields.pop("repetition_penalty")


def _model(entry: dict[str, Any]) -> EngineModel:
    """Return a model of the API v1."""
    abilities = entry.get("capabilities")
    vision = isinstance(abilities, dict) and abilities.get("vision") is True
    return EngineModel(
        model_name(entry.get("key")),
        TAKES_ALL if vision else _NO_PICTURES,
        loaded=bool(objects(entry.get("loaded_instances"))),
        size_bytes=count(entry.get("size_bytes")),
        context_tokens=count(entry.get("max_context_length")),
    )


def _older_model(entry: dict[str, Any]) -> EngineModel:
    """Return a model of the API v0."""
    return EngineModel(
        model_name(entry.get("id")),
        TAKES_ALL if entry.get("type") == "vlm" else _NO_PICTURES,
        loaded=entry.get("state") != "not-loaded",
        context_tokens=count(entry.get("loaded_context_length"))
        or count(entry.get("max_context_length")),
    )
