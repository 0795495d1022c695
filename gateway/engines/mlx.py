"""The servers of mlx-lm, mlx-vlm and vllm-mlx, which all sample by the functions of mlx-lm.

By their sources of 0.32.2, 0.7.10 and 0.6.0, and recorded from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from gateway.engines.base import (
    Ask,
    EngineModel,
    EngineState,
    Isolation,
    Question,
    Told,
    named,
    object_of,
)
from gateway.engines.openai import MODELS, LocalEngine
from gateway.engines.refusals import Phrase
from gateway.errors import GatewayError
from gateway.protocols.engine_answer import FORMS
from gateway.protocols.event_stream import count, fact_pattern
from gateway.strict_json import Pieces
from gateway.types import Drafts, Json
from paceline.protocol import Speculation

_WHOLE_VOCABULARY = 32_000
"""Tokens that nearly all models have; few have less."""
_OWN_MODEL = "default_model"
"""The name that `mlx_lm.server` uses for its initial model."""
_MISTAKES = re.compile(rb"is not supported|audio format|has to be an integer in the")
"""How `mlx_vlm.server` words that its drafter or sampler does not take a request, or no audio."""
_TENANT = "x-apc-tenant"
"""The header that separates tenants in the prefix cache of `mlx_vlm.server`."""
_METADATA = "generation_metadata"
"""Of an answer of vllm-mlx, null if it reports nothing."""


class _MlxEngine(LocalEngine):
    def adapt(self, fields: Json) -> None:
        """Leave out a `top_k` that excludes no token: one beyond the vocabulary ends the engine."""
        if (fields.get("top_k") or 0) >= _WHOLE_VOCABULARY:
            del fields["top_k"]


class MlxLm(_MlxEngine):
    """An `mlx_lm.server`: text, one model in memory, and 404 for any error.

    It loads whatever model a request names, and lists all that it finds on its disk. Its HTTP
    thread still answers after the generating thread has died; only `/health` shows that.
    """

    kind = "mlx-lm"
    health = Question("/health")
    phrases = (
        Phrase(
            "top_logprobs must be",
            "The engine returns at most 11 alternatives per token.",
            "top_logprobs",
            "invalid_value",
        ),
        Phrase(
            r"\(char [0-9]+\)",  # Python's errors of JSON, here of calls in earlier messages
            "The arguments of tool calls in 'messages' must be JSON objects.",
            "messages",
            "invalid_value",
        ),
    )

    async def ask_state(self, ask: Ask) -> EngineState:
        """List its models; the last requested one is in memory.

        Without a folder of downloads it cannot list any, even the model that it serves. Then this
        trusts the names that an admin gave.
        """
        listed = named((await ask(MODELS)).objects())
        if not listed:
            return EngineState(tuple(map(EngineModel, self._names.values() or (_OWN_MODEL,))))
        last = self._last_model
        models = [EngineModel(name, loaded=last in ("", name)) for name, _ in listed]
        return EngineState(tuple(models))

    def listed_as(self, name: str, listed: Collection[str]) -> str:
        """Return a listed name, or its own name of its initial model."""
        return name if name in listed or name == _OWN_MODEL else ""

    def adapt(self, fields: Json) -> None:
        """Send no negative seed, at which it closes the connection."""
        super().adapt(fields)
        if (fields.get("seed") or 0) < 0:
            fields["seed"] %= 2**63

    def refusal(self, status: int, body: bytes, fields: Mapping[str, Any]) -> GatewayError:
        """Return words of ours; it answers 404 to whatever it does not take."""
        return super().refusal(400 if status == 404 else status, body, fields)


class MlxVlm(_MlxEngine):
    """An `mlx_vlm.server`, with a drafter or without, and a cache apart for each tenant."""

    kind = "mlx-vlm"
    health = Question("/health")
    isolation = Isolation.CACHE_SALT

    async def ask_state(self, ask: Ask) -> EngineState:
        """List its models, in memory or on its disk."""
        listed = named((await ask(MODELS)).admitted().objects())
        health = (await ask(self.health)).object()
        context = count(health.get("effective_context_limit"))
        models = [
            EngineModel(name, loaded=bool(entry.get("loaded", True)), context_tokens=context)
            for name, entry in listed
        ]
        return EngineState(tuple(models))

    def headers(self, told: Told) -> Mapping[str, str]:
        """Return the key, and the isolation scope as the tenant."""
        return {**super().headers(told), _TENANT: told.scope}

    def body(self, body: Pieces, fields: Mapping[str, Any], salt: str) -> Pieces:
        """Return the body without a salt: the header isolates."""
        return super().body(body, fields, "")

    def refusal(self, status: int, body: bytes, fields: Mapping[str, Any]) -> GatewayError:
        """Return words of ours; it answers 500 to some mistakes of clients."""
        if status == 500 and _MISTAKES.search(body):
            status = 400
        return super().refusal(status, body, fields)


class VllmMlx(_MlxEngine):
    """A server of vllm-mlx, with the drafts of each answer beside it.

    Its answers do not report its prefix cache, which supports no scopes.
    """

    kind = "vllm-mlx"
    health = Question("/v1/status")
    facts = fact_pattern(*FORMS, _METADATA)

    @staticmethod
    def drafts(answer: Mapping[str, Any]) -> Drafts | None:
        """Read the drafts of an answer, one token a step; None if it reports none."""
        metadata = object_of(answer.get(_METADATA))
        if metadata.get("mtp_drafts") is None:
            return None
        drafted, accepted = count(metadata["mtp_drafts"]), count(metadata.get("mtp_accepted"))
        histogram = (drafted - accepted, accepted)
        return Drafts(drafted, drafted, accepted, histogram) if accepted <= drafted else None

    def refusal(self, status: int, body: bytes, fields: Mapping[str, Any]) -> GatewayError:
        """Return words of ours; a schema that it cannot compile ends in 500 without a word."""
        if status == 500 and body == b"Internal Server Error" and fields.get("response_format"):
            body = b"response_format"
        return super().refusal(status, body, fields)

    async def ask_state(self, ask: Ask) -> EngineState:
        """List its models, and read the counts of its drafts."""
        state = await super().ask_state(ask)
        mtp = object_of((await ask(self.health)).object().get("mtp"))
        if not mtp.get("enabled"):
            return state
        drafted, accepted, lost = (count(mtp.get(k)) for k in ("attempted", "accepted", "errors"))
        if accepted + lost > drafted:
            return state._replace(drafts=True)
        # It counts steps of a batch, each with one draft token.
        counts = Speculation(
            num_spec_tokens=1, steps=drafted, drafted=drafted, accepted=accepted, errors=lost,
            histogram=(drafted - accepted, accepted),
        )  # fmt: skip
        return state._replace(drafts=True, speculation=counts)
