"""What became of a request: the last of the values that pass from step to step."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from gateway.domain import Caller, Candidate, Decision, Inspected


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


class Served(NamedTuple):
    """One finished request: all that accounting may know of it."""

    request_id: str
    outcome: Outcome
    status: int
    seconds: float
    code: str = ""
    """What the error counts as, empty when there was none."""
    inspected: Inspected | None = None
    decision: Decision | None = None
    candidate: Candidate | None = None
    attempts: int = 0
    usage: Usage = Usage()
    waited_s: float = 0.0
    """In the waiting line for a slot."""
    added_s: float | None = None
    """From the whole body read to the request handed to the worker, without the waiting line."""
    first_token_s: float | None = None
    """From the whole body read to the first event with content, for streams."""
    token_s: float | None = None
    """For each token after the first one, for streams that came to their end."""
    drafts: Drafts | None = None
    """As the worker counted them; None where it told of none."""
    caller: Caller = Caller()
    spent: Spent = Spent()
    """Nothing without a key."""
    prefix: str = "none"
    """What became of its system prompt: hit, miss, or none to look for."""
