"""Workers of Paceline, which join by heartbeats, and other gateways of Paceline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from gateway.engines.base import (
    Ask,
    Engine,
    EngineState,
    EngineUnusable,
    HttpAnswer,
    Isolation,
    Question,
    Told,
    objects,
)
from gateway.engines.openai import OpenAIEngine
from gateway.engines.refusals import own_refusal
from gateway.errors import GatewayError
from gateway.routing.features import Feature
from gateway.routing.prefix_keys import PrefixKeys
from gateway.routing.view import ModelView
from gateway.strict_json import Pieces, encode_body, size_of
from paceline.protocol import (
    KEYS_HEADER,
    NO_PREFIX,
    SCOPE_HEADER,
    SOURCES_HEADER,
    TOKENS_LIMIT_HEADER,
    WorkerReport,
)
from paceline.request.fields import CACHE_SALT

_NO_PICTURES = frozenset((Feature.IMAGE,))
REPORT_PATH = "/v1/status"
"""At which a worker returns its report."""


class _Paceline(Engine):
    """A worker or a gateway of Paceline, whose errors a client may read as they are."""

    kind = "paceline"
    tells_fault = True

    def refusal(
        self,
        status: int,
        body: bytes,
        fields: Mapping[str, Any],  # noqa: ARG002
    ) -> GatewayError:
        """Return the error in its own words: they are ours."""
        return own_refusal(status, body)


class PacelineWorker(_Paceline):
    """A worker of Paceline that sends heartbeats, authorized by the join token."""

    sends_reports = True
    shares_slots = False
    continues_streams = True
    isolation = Isolation.CACHE_SALT

    def models(self, report: WorkerReport) -> tuple[str, ...]:
        """Return the one model of the report."""
        return (report.model,)

    def model_views(self, report: WorkerReport) -> Mapping[str, ModelView]:
        """Return that the model lacks pictures, if it does."""
        return {} if report.sees_pictures else {report.model: ModelView(_NO_PICTURES)}

    def headers(self, told: Told) -> Mapping[str, str]:
        """Return the token, the lane, what isolates the prompt, its sources and its limit."""
        headers = {
            **self.authorization,
            "x-paceline-lane": told.lane,
            KEYS_HEADER: _keys_text(told.prefix),
            SCOPE_HEADER: told.scope,
        }
        if told.sources:
            headers[SOURCES_HEADER] = to_json(told.sources).decode()
        if told.token_limit is not None:
            headers[TOKENS_LIMIT_HEADER] = str(told.token_limit)
        return headers

    def body(self, body: Pieces, fields: Mapping[str, Any], salt: str) -> Pieces:  # noqa: ARG002
        """Return the serialized body: the headers carry the rest."""
        return body


class PacelineGateway(_Paceline, OpenAIEngine):
    """Another gateway of Paceline: an OpenAI server that tells drafts and cached tokens."""

    lacks = frozenset()
    default_pools = ("text-mtp", "vlm")
    default_slots = 16
    isolation = Isolation.CACHE_SALT

    @classmethod
    def is_sign(cls, answer: HttpAnswer) -> bool:
        """Return whether the models are those of a Paceline."""
        return any(
            one.get("owned_by") == "paceline" for one in objects(answer.object().get("data"))
        )

    async def read(self, ask: Ask) -> EngineState:
        """Return its models without their aliases, which would name each twice."""
        listed = (await ask(Question(self.models_path))).object().get("data")
        state = self.state_of(listed, root=True)
        if not state.models:
            raise EngineUnusable("The gateway at this URL serves no model now.")
        return state

    def body(self, body: Pieces, fields: Mapping[str, Any], salt: str) -> Pieces:
        """Return the whole body with the draft counts requested, which this gateway counts."""
        model = self.names.get(fields["model"], fields["model"])
        isolated = {CACHE_SALT: salt} if salt else {}
        sent = {"metrics": "summary", **fields, **isolated, "model": model}
        return encode_body(sent, size_of(body))


def _keys_text(prefix: PrefixKeys) -> str:
    """Return the keys of a prompt as a header: that of the system prompt is always last."""
    if not prefix.ends:
        return NO_PREFIX
    keys = [end.key.hex() for end in prefix.claimed]
    return ",".join(keys if prefix.has_system else [*keys, NO_PREFIX])
