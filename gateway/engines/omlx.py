"""oMLX: several models of one Mac, loaded as they are requested.

By its published source; not run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.base import (
    Ask,
    EngineModel,
    EngineState,
    HttpAnswer,
    Question,
    count,
    model_name,
    objects,
)
from gateway.engines.local import LocalEngine
from gateway.protocols.event_stream import read_usage
from gateway.routing.features import Feature
from gateway.routing.view import TAKES_ALL
from gateway.types import Usage

_TEXT = frozenset((Feature.IMAGE, Feature.VIDEO, Feature.AUDIO))
_CHATS = ("llm", "vlm")


def _usage(answer: Mapping[str, Any]) -> Usage | None:
    """Read the usage, whose cached tokens may stand beside the others."""
    usage = read_usage(answer)
    told = answer["usage"].get("cached_tokens") if usage else None
    if usage is None or usage.cached_known or told is None:
        return usage
    return usage._replace(cached_tokens=min(count(told), usage.prompt_tokens), cached_known=True)


class Omlx(LocalEngine):
    """A server of oMLX."""

    kind = "omlx"
    health = Question("/health")
    lacks = frozenset(
        (
            *(Feature.FILE, Feature.CHOICES, Feature.PROMPTS, Feature.ECHO, Feature.LOGPROBS),
            *(Feature.STOP_TOKENS, Feature.MIN_TOKENS, Feature.IGNORE_EOS, Feature.TRUNCATION),
            *(Feature.TOP_K, Feature.REPETITION_PENALTY, Feature.LOGIT_BIAS, Feature.EXACT),
            *(Feature.CONTINUATION, Feature.CALLS),
        )
    )
    usage = staticmethod(_usage)

    @classmethod
    def is_sign(cls, answer: HttpAnswer) -> bool:
        """Return whether the models are those of oMLX."""
        return any(one.get("owned_by") == "omlx" for one in objects(answer.object().get("data")))

    async def read(self, ask: Ask) -> EngineState:
        """List its models that chat, and which are in memory."""
        state = await super().read(ask)
        status = (await ask(Question("/v1/models/status"))).object().get("models")
        told: dict[str, dict[str, Any]] = {}
        for entry in objects(status):
            for key in ("id", "model_alias"):  # the list names a model by its alias
                if name := model_name(entry.get(key)):
                    told[name] = entry
        return state._replace(
            models=tuple(
                _model(model, told.get(model.name, {}))
                for model in state.models
                if told.get(model.name, {}).get("model_type", "llm") in _CHATS
            )
        )


def _model(model: EngineModel, told: Mapping[str, Any]) -> EngineModel:
    text = told.get("model_type") == "llm"
    return model._replace(
        lacks=_TEXT if text else TAKES_ALL,
        loaded=bool(told.get("loaded", True)),
        size_bytes=count(told.get("actual_size")) or count(told.get("estimated_size")),
        context_tokens=count(told.get("max_context_window")) or model.context_tokens,
    )
