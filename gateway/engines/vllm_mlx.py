"""`vllm-mlx`: text and pictures, with the drafts of each answer beside it.

By its source of 0.6.0, and recorded from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.engines.base import Ask, EngineState, HttpAnswer, Question, count
from gateway.engines.local import MlxEngine
from gateway.errors import GatewayError
from gateway.protocols.engine_answer import FORMS
from gateway.protocols.event_stream import fact_pattern
from gateway.routing.features import Feature
from gateway.types import Drafts
from paceline.protocol import Speculation

_METADATA = "generation_metadata"
"""Of an answer with something to tell, else null."""


def _drafts(answer: Mapping[str, Any]) -> Drafts | None:
    """Read the drafts of an answer, one token a step; None if it tells none."""
    metadata = answer.get(_METADATA)
    if not isinstance(metadata, dict) or metadata.get("mtp_drafts") is None:
        return None
    drafted, accepted = count(metadata["mtp_drafts"]), count(metadata.get("mtp_accepted"))
    if accepted > drafted:
        return None
    return Drafts(drafted, drafted, accepted, (drafted - accepted, accepted))


class VllmMlx(MlxEngine):
    """A server of vllm-mlx. Its prefix cache is not told in answers and knows no scopes."""

    kind = "vllm-mlx"
    sign = health = Question("/v1/status")
    lacks = frozenset(
        (
            *(Feature.FILE, Feature.CHOICES, Feature.PROMPTS, Feature.ECHO, Feature.LOGPROBS),
            *(Feature.STOP, Feature.MIN_TOKENS, Feature.IGNORE_EOS, Feature.TRUNCATION),
            *(Feature.CONTINUATION, Feature.EXACT, Feature.CALLS, *MlxEngine.token_ids),
        )
    )

    facts = fact_pattern(*FORMS, _METADATA)
    drafts = staticmethod(_drafts)

    def refusal(self, status: int, body: bytes, fields: Mapping[str, Any]) -> GatewayError:
        """Return words of ours; a schema that it cannot compile ends in 500 without a word."""
        if status == 500 and body == b"Internal Server Error" and fields.get("response_format"):
            body = b"response_format"
        return super().refusal(status, body, fields)

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
