"""Ollama: several models of one machine, loaded as they are requested.

By its published API description and source; not run here.
"""

from __future__ import annotations

from collections.abc import Collection
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
from gateway.routing.features import Feature

_TAGS = Question("/api/tags")
_LOADED = Question("/api/ps")
_FEATURES = {"vision": Feature.IMAGE, "tools": Feature.TOOLS}
"""Names of abilities, and the features of requests that need them."""


class Ollama(LocalEngine):
    """A server of Ollama. It tells neither cached tokens nor drafts and knows no scopes."""

    kind = "ollama"
    sign = health = Question("/api/version")
    lacks = frozenset(
        (
            *(Feature.VIDEO, Feature.AUDIO, Feature.FILE, Feature.CHOICES, Feature.PROMPTS),
            *(Feature.ECHO, Feature.LOGPROBS, Feature.STOP_TOKENS, Feature.MIN_TOKENS),
            *(Feature.IGNORE_EOS, Feature.TRUNCATION, Feature.THINKING_BUDGET, Feature.TOP_K),
            *(Feature.MIN_P, Feature.REPETITION_PENALTY, Feature.LOGIT_BIAS, Feature.EXACT),
            *(Feature.CONTINUATION, Feature.CALLS),
        )
    )
    default_slots = 4

    def __init__(self, *args: Any, **given: Any) -> None:
        self._abilities: dict[str, EngineModel] = {}
        """What `/api/show` tells of the models listed last, by the digest of their weights."""
        super().__init__(*args, **given)

    @classmethod
    def is_sign(cls, answer: HttpAnswer) -> bool:
        """Return whether the server tells a version, and nothing else."""
        return answer.object().keys() == {"version"}

    async def read(self, ask: Ask) -> EngineState:
        """List its models that chat, and which are in memory."""
        tags = (await ask(_TAGS)).admitted()
        loaded = {one.get("name") for one in objects((await ask(_LOADED)).object().get("models"))}
        models = []
        known, self._abilities = self._abilities, {}
        for entry in objects(tags.object().get("models")):
            name = model_name(entry.get("name"))
            wanted = set(self._names.values())
            if not name or (wanted and wanted.isdisjoint((name, name.removesuffix(":latest")))):
                continue
            digest = str(entry.get("digest", ""))[:128]
            if digest in known:
                self._abilities[digest] = known[digest]
            shown = await self._shown(ask, name, digest)
            if shown is not None:
                models.append(
                    shown._replace(
                        name=name, loaded=name in loaded, size_bytes=count(entry.get("size"))
                    )
                )
        if not models and not self._names:
            raise EngineUnusable("The engine lists no models; `ollama pull` loads one.")
        return EngineState(tuple(models))

    async def _shown(self, ask: Ask, name: str, digest: str) -> EngineModel | None:
        """Return what a model can do; None if it does not chat."""
        if digest not in self._abilities:
            shown = (await ask(Question("/api/show", {"model": name}))).object()
            abilities = shown.get("capabilities")
            info = shown.get("model_info")
            lacks = frozenset[Feature]()
            chats = True
            if isinstance(abilities, list):
                chats = "completion" in abilities
                lacks = frozenset(
                    feature for ability, feature in _FEATURES.items() if ability not in abilities
                )
            contexts = [
                count(value)
                for key, value in (info.items() if isinstance(info, dict) else ())
                if str(key).endswith(".context_length")
            ]
            context = max(contexts, default=0)
            found = EngineModel(name if chats else "", lacks, context_tokens=context)
            if not digest:
                return found if chats else None
            self._abilities[digest] = found
        model = self._abilities[digest]
        return model if model.name else None

    def listed_as(self, name: str, listed: Collection[str]) -> str:
        """Return a listed name; one without a tag is the latest."""
        return next((one for one in (name, f"{name}:latest") if one in listed), "")
