"""What became of a request: the last of the values that pass from step to step."""

from __future__ import annotations

from typing import NamedTuple

from gateway.routing.select import Candidate, Decision
from gateway.types import Caller, Drafts, Inspected, Outcome, Spent, Usage


class RequestRecord(NamedTuple):
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
