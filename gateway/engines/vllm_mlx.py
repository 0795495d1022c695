"""`vllm-mlx`: text and pictures, with counts of drafts for the whole server alone.

By its source of 0.6.0; not run here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gateway.engines.base import Ask, EngineState, HttpAnswer, Question, count
from gateway.engines.local import REASONING_FACTS, spell_reasoning, use_max_tokens
from gateway.engines.openai import OpenAIEngine
from gateway.routing.features import Feature
from workers.protocol import Speculation


class VllmMlx(OpenAIEngine):
    """A server of vllm-mlx. Its prefix cache is not told in answers and knows no scopes."""

    kind = "vllm-mlx"
    sign = health = Question("/v1/status")
    lacks = frozenset(
        (
            *(Feature.FILE, Feature.CHOICES, Feature.PROMPTS, Feature.ECHO, Feature.LOGPROBS),
            *(Feature.STOP, Feature.STOP_TOKENS, Feature.MIN_TOKENS, Feature.IGNORE_EOS),
            *(Feature.TRUNCATION, Feature.LOGIT_BIAS),
        )
    )
    facts = REASONING_FACTS

    @classmethod
    def is_sign(cls, answer: HttpAnswer) -> bool:
        """Return whether the status has fields that only this server has."""
        return {"num_running", "num_waiting", "uptime_s"} <= answer.object().keys()

    async def read(self, ask: Ask) -> EngineState:
        """List its models, and read the counts of its drafts."""
        state = await super().read(ask)
        mtp = (await ask(self.health)).object().get("mtp")
        if not isinstance(mtp, dict) or not mtp.get("enabled"):
            return state
        drafted, accepted = count(mtp.get("attempted")), count(mtp.get("accepted"))
        lost = count(mtp.get("errors"))
        if accepted + lost > drafted:
            return state._replace(drafts=True)
        # It counts steps of a batch, each with one draft token.
        counts = Speculation(
            num_spec_tokens=1, steps=drafted, drafted=drafted, accepted=accepted, errors=lost,
            histogram=(drafted - accepted, accepted),
        )  # fmt: skip
        return state._replace(drafts=True, speculation=counts)

    def listed_as(self, name: str, listed: Collection[str]) -> str:
        """Return a listed name; the engine has no others."""
        return name if name in listed else ""

    def adapt(self, fields: dict[str, Any], salt: str) -> None:  # noqa: ARG002
        """Limit the answer by the field that it knows."""
        use_max_tokens(fields)

    def normalise(self, answer: dict[str, Any]) -> bool:
        """Spell reasoning as clients expect it."""
        return spell_reasoning(answer)
