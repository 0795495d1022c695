"""`mlx_vlm.server`: text and pictures, drafts told in each answer, a cache apart for tenants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.engines.base import (
    Ask,
    EngineModel,
    EngineState,
    HttpAnswer,
    Isolation,
    Question,
    Told,
    count,
    model_name,
    objects,
)
from gateway.engines.local import MlxEngine, drafts_of_timings
from gateway.errors import GatewayError
from gateway.protocols.engine_answer import FORMS
from gateway.protocols.event_stream import fact_pattern
from gateway.routing.features import Feature
from gateway.strict_json import Pieces

_MISTAKES = re.compile(rb"is not supported|audio format|has to be an integer in the")
"""What it says of a request that its drafter or its sampler does not take, and of no audio."""
_TENANT = "x-apc-tenant"
"""The header by which its prefix cache tells tenants apart."""


class MlxVlm(MlxEngine):
    """An `mlx_vlm.server`, with a drafter or without."""

    kind = "mlx-vlm"
    sign = health = Question("/health")
    lacks = frozenset(
        (
            *(Feature.COMPLETIONS, Feature.FILE, Feature.CHOICES, Feature.PROMPTS, Feature.ECHO),
            *(Feature.STOP, Feature.MIN_TOKENS, Feature.IGNORE_EOS),
            *(Feature.TRUNCATION, Feature.CONTINUATION, Feature.EXACT, Feature.CALLS),
            *MlxEngine.token_ids,
        )
    )
    facts = fact_pattern(*FORMS, "timings")
    drafts = staticmethod(drafts_of_timings)
    isolation = Isolation.CACHE_SALT

    @classmethod
    def is_sign(cls, answer: HttpAnswer) -> bool:
        """Return whether the state of health has fields that only this server has."""
        return {"loaded_tool_parser", "apc_enabled"} <= answer.object().keys()

    async def read(self, ask: Ask) -> EngineState:
        """List its models, in memory or on its disk."""
        await super().read(ask)
        listed = (await ask(Question(self.models_path))).object().get("data")
        health = (await ask(self.health)).object()
        context = count(health.get("effective_context_limit"))
        models = [
            EngineModel(name, loaded=bool(entry.get("loaded", True)), context_tokens=context)
            for entry in objects(listed)
            if (name := model_name(entry.get("id")))
        ]
        return EngineState(tuple(models))

    def headers(self, told: Told) -> Mapping[str, str]:
        """Return the key, and the isolation scope as the tenant."""
        return {**super().headers(told), _TENANT: told.scope}

    def body(self, body: Pieces, fields: Mapping[str, Any], salt: str) -> Pieces:  # noqa: ARG002
        """Return the body without a salt: the header isolates."""
        return super().body(body, fields, "")

    def refusal(self, status: int, body: bytes, fields: Mapping[str, Any]) -> GatewayError:
        """Return words of ours; it answers 500 to some mistakes of clients."""
        if status == 500 and _MISTAKES.search(body):
            status = 400
        return super().refusal(status, body, fields)
