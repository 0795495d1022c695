"""The values that pass from step to step: inspect -> decide -> forward -> account.

All are tuples: each is made for every request, and a frozen dataclass takes three times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from policies.document import Priority
from policies.request.profile import RequestProfile

WorkerBoot = tuple[str, str]
"""A worker by id and boot: what it keeps in memory ends with its life."""
NOWHERE = "none"
"""The pool of a request that reached none."""
Header = tuple[bytes, bytes]
"""As ASGI has it: the name in lower case, and the value."""
Headers = list[Header]


def fits_header(secret: str) -> bool:
    """Say whether a header can hold it; what cannot be sent would stand in the log as an error."""
    return secret.isascii() and secret.isprintable() and secret == secret.strip()


class Inspected(NamedTuple):
    """A request that was read and found good."""

    asked_model: str
    """The name that the client used."""
    profile: RequestProfile
    """Its `model` is the resolved one."""
    body: Mapping[str, Any]
    """What a worker gets: normalised messages, effective sampling, no nulls."""


class Caller(NamedTuple):
    """Who asks, for as far as waiting is concerned."""

    client: str = "anonymous"
    """Those who share it share one place in a waiting line."""
    priority: Priority = Priority.DEFAULT
    key: str = ""
    team: str = ""
    pools: frozenset[str] | None = None
    """Those that the key may use; None: all."""


class Usage(NamedTuple):
    """Tokens of one request as its worker counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Drafts(NamedTuple):
    """What drafting did for one request."""

    steps: int
    drafted: int
    accepted: int
    histogram: tuple[int, ...]
    """Steps by how many draft tokens they accepted: none, one, two ..."""


class Spent(NamedTuple):
    """What one request has cost its key."""

    requests: int = 0
    tokens: int = 0
    guessed_tokens: int = 0
    """Of `tokens`, those that no worker has told of."""


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """The request was at fault."""
    UNSERVED = "unserved"
    """Nobody could take it."""
    FAILED = "failed"
    """The worker was at fault."""
    CLIENT_LEFT = "client_left"


UNUSED = Usage()
"""Of a request that no worker has counted."""
NO_PREFIX = "none"
