"""The interface of a kind of engine, and the state that an engine reports."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from pydantic_core import from_json

from gateway.errors import GatewayError
from gateway.protocols.event_stream import AnswerReader
from gateway.routing.features import Feature
from gateway.routing.prefix_keys import NO_KEYS, PrefixKeys
from gateway.routing.view import TAKES_ALL, ModelView
from gateway.strict_json import Pieces
from gateway.types import MAX_ENGINE_MODELS, Json
from paceline.names import MODEL_PATTERN
from paceline.protocol import NO_PREFIX, NodeSource, Speculation, WorkerReport

_MODEL_NAME = re.compile(MODEL_PATTERN)
# Reading weights from the disk of a Mac, and the start of a model whose size is unknown.
_LOAD_BYTES_PER_S = 2e9
_LOAD_LEAST_S = 2.0
_LOAD_UNKNOWN_S = 10.0


class HttpAnswer(NamedTuple):
    """The answer of an engine to one question of the gateway."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    text: str

    def admitted(self) -> HttpAnswer:
        """Return the answer; raise `EngineUnusable` if the engine refuses the gateway's key."""
        if self.status in (401, 403):
            raise EngineUnusable("The engine rejects the API key.")
        return self

    def object(self) -> Json:
        """Return the body as a JSON object, empty if it is anything else, or an error."""
        try:
            return object_of(
                from_json(self.text, allow_inf_nan=False) if self.status == 200 else {}
            )
        except ValueError:
            return {}

    def objects(self, name: str = "data") -> list[Json]:
        """Return the objects of a list in the body."""
        return objects(self.object().get(name))


class Question(NamedTuple):
    """A request of the gateway to an engine, in its own name: it carries nothing of a client."""

    path: str
    body: Mapping[str, Any] | None = None
    """Sent as JSON by POST; None: GET."""


Ask = Callable[[Question], Awaitable[HttpAnswer]]
"""Asks an engine; raises `EngineSilent` if it does not answer in time."""


class EngineSilent(Exception):
    """An engine gave no answer; the message is the end of a sentence for admins.

    `timed_out`: it may be busy, for it has a connection.
    """

    def __init__(self, why: str, *, timed_out: bool = False) -> None:
        super().__init__(why)
        self.timed_out = timed_out


class EngineUnusable(Exception):
    """An engine answers, and cannot be used as it is; the message is a sentence for admins."""


class EngineModel(NamedTuple):
    """One model of an engine."""

    name: str
    """As the engine spells it: a name, `org/name:tag`, or the path of a folder."""
    lacks: frozenset[Feature] = TAKES_ALL
    """Features that this model lacks, in addition to those of the kind."""
    loaded: bool = True
    """Whether it is in memory; True if the engine does not report it."""
    size_bytes: int = 0
    """Of its weights; 0 if unknown."""
    context_tokens: int = 0
    """0 if unknown."""

    @property
    def load_s(self) -> float:
        """Return the estimated time to load it; 0 if it is in memory."""
        if self.loaded:
            return 0.0
        if not self.size_bytes:
            return _LOAD_UNKNOWN_S
        return max(_LOAD_LEAST_S, self.size_bytes / _LOAD_BYTES_PER_S)


class EngineState(NamedTuple):
    """The state that an engine reports at one time."""

    models: tuple[EngineModel, ...] = ()
    slots: int | None = None
    """Requests that it runs at a time; None if unknown."""
    drafts: bool = False
    """It decodes speculatively."""
    speculation: Speculation | None = None
    """Its own counts of drafts since its start, of all its clients; None if unknown."""


class Isolation(Enum):
    """How an engine keeps the cached prompts of isolation scopes apart."""

    CACHE_SALT = "cache_salt"
    """By the field `cache_salt` of vLLM."""
    NO_REUSE = "no reuse"
    """By reading prompts again, once it has served two scopes."""
    NONE = "none"
    """Not at all: the time to the first token shows whether somebody has sent a prompt before."""


class Told(NamedTuple):
    """The headers for a worker about one request."""

    worker_id: str
    lane: str
    prefix: PrefixKeys = NO_KEYS
    scope: str = NO_PREFIX
    """The name of the isolation scope."""
    token_limit: int | None = None
    """The most tokens that the request may use; None: no limit."""
    sources: Sequence[NodeSource] = ()
    """Workers that have more of the prompt."""


class Engine(AnswerReader, ABC):
    """One worker, as its kind of engine wants to be called. `token` authorizes the gateway."""

    kind: ClassVar[str]
    sends_reports: ClassVar[bool] = False
    """The worker sends heartbeats with reports, which the gateways share."""
    shares_slots: ClassVar[bool] = True
    """The lanes and the models of the worker share its slots."""
    continues_streams: ClassVar[bool] = False
    """The worker reports the tokens of a stream, and can continue another worker's stream."""
    tells_fault: ClassVar[bool] = False
    """The type of an error, also in a stream, shows whether the request is at fault."""
    isolation: Isolation = Isolation.NONE

    def __init__(self, token: str = "") -> None:
        self.authorization = {"authorization": f"Bearer {token}"} if token else {}

    def authorization_of(self, _worker_id: str) -> Mapping[str, str]:
        """Return the header that authorizes the gateway at a worker."""
        return self.authorization

    def server_name(self, _worker_id: str) -> str:
        """Return the name in the certificate of a paired worker; '' for others."""
        return ""

    @abstractmethod
    def models(self, report: WorkerReport) -> tuple[tuple[str, ...], Mapping[str, ModelView]]:
        """Return the models that a worker serves, by their names in the fleet.

        Then those of them that lack a feature or are not in memory.
        """

    @abstractmethod
    def headers(self, told: Told) -> Mapping[str, str]:
        """Return the headers that a request needs beside those of every request."""

    @abstractmethod
    def body(self, body: Pieces, fields: Mapping[str, Any], salt: str) -> Pieces:
        """Return the body to send, given the serialized body and its fields.

        `salt` names the isolation scope of the request; empty if all share cached prompts.
        """

    @abstractmethod
    def refusal(self, status: int, body: bytes, fields: Mapping[str, Any]) -> GatewayError:
        """Return the error for a failed answer; `fields` are those of the request.

        A `RefusedByWorker` is the client's fault and counts as an answer of the engine.
        """


def object_of(value: object) -> Json:
    """Return an object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[Json]:
    """Return the objects of a list, at most `MAX_ENGINE_MODELS`; none if it is no list."""
    if not isinstance(value, list):
        return []
    return [one for one in value[:MAX_ENGINE_MODELS] if isinstance(one, dict)]


def named(entries: Sequence[Json], key: str = "id") -> list[tuple[str, Json]]:
    """Return entries with the name of each model; none that no label or header can carry."""
    names = [entry.get(key) for entry in entries]
    return [
        (name, entry)
        for name, entry in zip(names, entries, strict=True)
        if isinstance(name, str) and _MODEL_NAME.fullmatch(name)
    ]
