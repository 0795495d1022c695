"""`mlx_lm.server`: text alone, one model in memory, and 404 for whatever goes wrong."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from gateway.engines.base import Ask, EngineModel, EngineState, HttpAnswer, Question
from gateway.engines.local import MlxEngine
from gateway.engines.refusals import phrase
from gateway.errors import GatewayError
from gateway.routing.features import Feature

_OWN_MODEL = "default_model"
"""Its name for the model with which it was started."""


class MlxLm(MlxEngine):
    """An `mlx_lm.server`.

    It loads whatever model a request names, and lists all that it finds on its disk. Its thread for
    HTTP answers while the one that generates has died; `/health` knows.
    """

    kind = "mlx-lm"
    sign = health = Question("/health")
    lacks = frozenset(
        (
            *(Feature.IMAGE, Feature.VIDEO, Feature.AUDIO, Feature.FILE),
            *(Feature.STRUCTURED_OUTPUT, Feature.CHOICES, Feature.PROMPTS, Feature.ECHO),
            *(Feature.MIN_TOKENS, Feature.IGNORE_EOS, Feature.TRUNCATION),
            *(Feature.THINKING_BUDGET, Feature.CONTINUATION, Feature.EXACT, Feature.CALLS),
            *MlxEngine.token_ids,
        )
    )
    phrases = (
        phrase(
            "top_logprobs must be",
            "The engine gives at most 11 alternatives of each token.",
            "top_logprobs",
            "invalid_value",
        ),
        phrase(
            r"\(char [0-9]+\)",  # Python's errors of JSON, here of calls in earlier messages
            "The arguments of tool calls in 'messages' must be JSON objects.",
            "messages",
            "invalid_value",
        ),
    )

    def __init__(self, *args: Any, **given: Any) -> None:
        self._last_model = ""
        super().__init__(*args, **given)

    @classmethod
    def is_sign(cls, answer: HttpAnswer) -> bool:
        """Return whether the standard library's server answers with a state of health."""
        try:
            status = json.loads(answer.text)
        except ValueError:
            return False
        by_library = answer.headers.get("server", "").startswith("BaseHTTP/")
        return by_library and status in ({"status": "ok"}, {"status": "unavailable"})

    async def read(self, ask: Ask) -> EngineState:
        """List its models; the last one that a request named is in memory.

        Without a folder of downloads it fails to list any, also the one that it serves. Then those
        that an admin has named are taken for granted.
        """
        state = self.state_of((await ask(Question(self.models_path))).object().get("data"))
        if not state.models:
            named = self._names.values() or (_OWN_MODEL,)
            return EngineState(tuple(map(EngineModel, named)))
        last = self._last_model
        models = [
            EngineModel(model.name, loaded=last in ("", model.name)) for model in state.models
        ]
        return state._replace(models=tuple(models))

    def listed_as(self, name: str, listed: Collection[str]) -> str:
        """Return a listed name, or its own name of the model with which it was started."""
        return name if name in listed or name == _OWN_MODEL else ""

    def adapt(self, fields: dict[str, Any], salt: str) -> None:
        """Remember the model, which the engine keeps in memory; send no negative seed."""
        self._last_model = fields["model"]
        super().adapt(fields, salt)
        if (fields.get("seed") or 0) < 0:  # it would close the connection
            fields["seed"] %= 2**63

    def refusal(self, status: int, body: bytes, fields: Mapping[str, Any]) -> GatewayError:
        """Return words of ours; it answers 404 to whatever it does not take."""
        return super().refusal(400 if status == 404 else status, body, fields)
