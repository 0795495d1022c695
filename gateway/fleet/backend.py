"""Kinds of workers: how the gateway addresses, authorizes and probes each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic_core import to_json

from gateway.config.static_workers import StaticWorker
from gateway.protocols.openai import for_openai
from gateway.routing.prefix_keys import PrefixKeys
from workers.protocol import (
    KEYS_HEADER,
    NO_PREFIX,
    SCOPE_HEADER,
    SOURCES_HEADER,
    TOKENS_LIMIT_HEADER,
    NodeSource,
    WorkerReport,
)


class Backend(ABC):
    """One kind of worker. `token` authorizes the gateway; empty: the worker asks for none."""

    sends_reports: ClassVar[bool]
    """The worker sends heartbeats with reports, which the gateways share."""
    shares_slots: ClassVar[bool]
    """The lanes of the worker share its slots."""
    probe_path: ClassVar[str]
    takes_cache_salt = False
    """The server isolates clients in its own prefix cache by the field `cache_salt`."""

    def __init__(self, token: str = "") -> None:
        self.authorization = {"authorization": f"Bearer {token}"} if token else {}

    @abstractmethod
    def models(self, report: WorkerReport) -> tuple[str, ...]:
        """Return the models that a worker serves."""

    def headers(
        self,
        lane: str,  # noqa: ARG002
        prefix: PrefixKeys,  # noqa: ARG002
        scope: str,  # noqa: ARG002
        token_limit: int | None,  # noqa: ARG002
        *,
        sources: Sequence[NodeSource] = (),  # noqa: ARG002
    ) -> Mapping[str, str]:
        """Return the headers that a request needs beside those of every request."""
        return self.authorization

    def body(self, body: bytes, fields: Mapping[str, Any]) -> bytes:  # noqa: ARG002
        """Return the body to send, given the serialized body and its fields."""
        return body


class PacelineBackend(Backend):
    """A worker of Paceline, authorized by the join token."""

    sends_reports = True
    shares_slots = False
    probe_path = "/v1/status"

    def models(self, report: WorkerReport) -> tuple[str, ...]:
        """Return the one model of the report."""
        return (report.model,)

    def headers(
        self,
        lane: str,
        prefix: PrefixKeys,
        scope: str,
        token_limit: int | None,
        *,
        sources: Sequence[NodeSource] = (),
    ) -> Mapping[str, str]:
        """Return the token, the lane, what isolates the prompt, its sources and its limit."""
        headers = {
            **self.authorization,
            "x-paceline-lane": lane,
            KEYS_HEADER: _keys_text(prefix),
            SCOPE_HEADER: scope,
        }
        if sources:
            headers[SOURCES_HEADER] = to_json(sources).decode()
        if token_limit is not None:
            headers[TOKENS_LIMIT_HEADER] = str(token_limit)
        return headers


class OpenAIBackend(Backend):
    """A static worker: any server with OpenAI's API, named in the settings."""

    sends_reports = False
    shares_slots = True
    probe_path = "/v1/models"

    def __init__(self, worker: StaticWorker, token: str = "") -> None:
        super().__init__(token)
        self.worker_id = worker.id
        self.report = worker.report
        """What the configuration says of the worker, as the report that it never sends."""
        self._models = tuple(dict.fromkeys(worker.models))
        self.takes_cache_salt = worker.cache_salt

    def models(self, report: WorkerReport) -> tuple[str, ...]:  # noqa: ARG002
        """Return the models of the settings."""
        return self._models

    def body(self, body: bytes, fields: Mapping[str, Any]) -> bytes:  # noqa: ARG002
        """Return the body without the fields that only Paceline's workers read."""
        return to_json(for_openai(fields), inf_nan_mode="null")


def _keys_text(prefix: PrefixKeys) -> str:
    """Return the keys of a prompt as a header: that of the system prompt is always last."""
    if not prefix.ends:
        return NO_PREFIX
    keys = [end.key.hex() for end in prefix.claimed]
    return ",".join(keys if prefix.has_system else [*keys, NO_PREFIX])
