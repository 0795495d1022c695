"""The values that the steps of a request share: inspect -> decide -> forward -> account.

All are tuples, created for every request: a frozen dataclass takes three times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from paceline.request.profile import Priority, RequestProfile

Json = dict[str, Any]
"""An object of JSON."""
WorkerBoot = tuple[str, str]
"""A worker id and its boot id: the memory of a worker is lost when its process ends."""
NOWHERE = "none"
"""The pool of a request that reached no pool."""
EngineKind = Literal[
    "auto",
    "paceline",
    "vllm-mlx",
    "mlx-vlm",
    "mlx-lm",
    "omlx",
    "lmstudio",
    "ollama",
    "llama.cpp",
    "openai",
]
"""The kinds of engines that an admin may name; `auto`: the gateway asks the engine.

They are here, and not with `gateway.engines`, because a command reads settings without engines.
"""
MAX_ENGINE_MODELS = 256
"""The models of one engine that the gateway lists; an engine may have more on its disk."""
RawBody = bytes | bytearray
"""The bytes of a body as they came; a large one has grown in place."""
Header = tuple[bytes, bytes]
"""A lower-case name and a value, as in ASGI."""
Headers = list[Header]


def header_problem(secret: str) -> str:
    """Return why a secret is no header value, or an empty text; the client's error would log it."""
    if secret != secret.strip():
        return "begins or ends with white space, which an HTTP header cannot carry"
    valid = secret.isascii() and secret.isprintable()
    return "" if valid else "contains characters that an HTTP header cannot carry"


class Inspected(NamedTuple):
    """A valid request."""

    asked_model: str
    """The model name in the body."""
    profile: RequestProfile
    """Its `model` is the resolved name."""
    body: Mapping[str, Any]
    """The body for a worker: normalised messages, effective sampling, no nulls, no `cache_salt`."""
    cache_salt: str = ""
    """What isolates the request from others of its client; empty if nothing does."""


class Caller(NamedTuple):
    """The client of a request, as queues and pools distinguish clients."""

    client: str = "anonymous"
    """Requests with the same value share one turn in a queue."""
    priority: Priority = Priority.DEFAULT
    key: str = ""
    team: str = ""
    pools: frozenset[str] | None = None
    """The pools that the key may use; None for all."""


class Usage(NamedTuple):
    """The tokens of one request, as its worker reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_known: bool = True
    """Whether the worker counts cached tokens; servers of other kinds may not."""
    written_tokens: int = 0
    """Other tokens of the prompt that its worker has stored for later prompts."""
    system_tokens: int = 0
    """Those of tools and system prompt."""
    reasoning_tokens: int = 0
    """Of the completion."""
    token_s: float | None = None
    """The mean time of each token after the first at the worker; None if it tells none."""


class Drafts(NamedTuple):
    """The speculative decoding of one request."""

    steps: int
    drafted: int
    accepted: int
    histogram: tuple[int, ...]
    """The number of steps that accepted no draft token, one, two ..."""


class LimitState(NamedTuple):
    """How much of a rate limit remains."""

    unit: str
    """`requests` or `tokens`."""
    limit: int
    remaining: int
    full_in_s: float
    """The time until it is full again."""


class Spent(NamedTuple):
    """The cost of one request, as charged to its key."""

    requests: int = 0
    tokens: int = 0
    guessed_tokens: int = 0
    """The part of `tokens` that is an estimate because no worker reported it."""


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """The request was at fault."""
    UNSERVED = "unserved"
    """No worker was available."""
    RESENT = "resent"
    """No worker was available; the proxy in front sends the request to another gateway."""
    FAILED = "failed"
    """The worker was at fault."""
    CLIENT_LEFT = "client_left"


NO_CALLER = Caller()
"""Of a request that needs no key, and belongs to no isolation scope."""
UNUSED = Usage()
"""The usage of a request without a report from a worker."""
NOTHING = Spent()
NO_PREFIX = "none"
