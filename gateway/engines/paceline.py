"""Workers of Paceline, which join by heartbeats, and other gateways of Paceline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr
from pydantic_core import from_json, to_json

from gateway import errors
from gateway.engines.base import (
    Ask,
    Engine,
    EngineModel,
    EngineState,
    EngineUnusable,
    Isolation,
    Told,
    named,
)
from gateway.engines.openai import MODELS, OpenAIEngine
from gateway.engines.refusals import failed
from gateway.errors import GatewayError
from gateway.protocols.engine_answer import CALLS
from gateway.protocols.event_stream import count, fact_pattern
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

_REFUSALS = frozenset((400, 413, 422))
_OF_THE_CLIENT = "invalid_request_error"
_NO_PICTURES = frozenset((Feature.IMAGE,))
REPORT_PATH = "/v1/status"
"""At which a worker returns its report."""


class _Paceline(Engine):
    """A worker or a gateway of Paceline, whose errors a client may read as they are."""

    kind = "paceline"
    tells_fault = True

    def refusal(self, status: int, body: bytes, fields: Mapping[str, Any]) -> GatewayError:
        """Return the error in its own words: they are ours.

        The status of a stream is that of its head: a later error has only a type.
        """
        try:
            error = from_json(body)["error"]
            message, param, code = error["message"], error.get("param"), error.get("code")
            of_client = status == 200 and error.get("type") == _OF_THE_CLIENT
        except (ValueError, TypeError, KeyError, AttributeError):
            return failed(status, "")
        if not (of_client or status in _REFUSALS) or message is None:
            return failed(status, "")
        begun = of_client or code == errors.CONSTRAINT_TOO_COSTLY
        return (errors.RefusedInAnswer if begun else errors.RefusedByWorker)(
            400 if of_client else status,
            str(message),
            param=param if isinstance(param, str) else None,
            code=code if isinstance(code, str) else None,
        )


class PacelineWorker(_Paceline):
    """A worker of Paceline that sends heartbeats, authorized by the join token or by its own."""

    facts = fact_pattern(CALLS)
    sends_reports = True
    shares_slots = False
    continues_streams = True
    isolation = Isolation.CACHE_SALT

    def __init__(self, token: str = "") -> None:
        super().__init__(token)
        self.paired: Mapping[str, SecretStr] = {}
        """The tokens of paired workers by their ids."""
        self.server_names: Mapping[str, str] = {}
        """The names in the certificates of those that have one."""

    def authorization_of(self, worker_id: str) -> Mapping[str, str]:
        """Return the header with the token of a paired worker, or else the join token."""
        if (token := self.paired.get(worker_id)) is None:
            return self.authorization
        return {"authorization": f"Bearer {token.get_secret_value()}"}

    def server_name(self, worker_id: str) -> str:
        """Return the name in the certificate of a paired worker; '' for others."""
        return self.server_names.get(worker_id, "")

    def models(self, report: WorkerReport) -> tuple[tuple[str, ...], Mapping[str, ModelView]]:
        """Return the one model of the report, and whether it lacks pictures."""
        blind = {} if report.sees_pictures else {report.model: ModelView(_NO_PICTURES)}
        return (report.model,), blind

    def headers(self, told: Told) -> Mapping[str, str]:
        """Return the token, the lane, the prompt's scope, its sources and its limit."""
        headers = {
            **self.authorization_of(told.worker_id),
            "x-paceline-lane": told.lane,
            KEYS_HEADER: _keys_text(told.prefix),
            SCOPE_HEADER: told.scope,
        }
        if told.sources:
            headers[SOURCES_HEADER] = to_json(told.sources).decode()
        if told.token_limit is not None:
            headers[TOKENS_LIMIT_HEADER] = str(told.token_limit)
        return headers

    def body(self, body: Pieces, fields: Mapping[str, Any], salt: str) -> Pieces:
        """Return the serialized body: the headers carry the rest."""
        return body


class PacelineGateway(_Paceline, OpenAIEngine):
    """Another gateway of Paceline: an OpenAI server that reports drafts and cached tokens."""

    default_pools = ("text-mtp", "vlm")
    default_slots = 16
    isolation = Isolation.CACHE_SALT

    async def ask_state(self, ask: Ask) -> EngineState:
        """Return its models without their aliases, which would name each twice."""
        models = [
            EngineModel(name, context_tokens=count(entry.get("max_model_len")))
            for name, entry in named((await ask(MODELS)).objects())
            if entry.get("root", name) == name
        ]
        if not models:
            raise EngineUnusable("The gateway at this URL serves no model now.")
        return EngineState(tuple(models))

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
