"""The record of a finished request, from which accounting, access log and traces are written."""

from __future__ import annotations

from typing import NamedTuple

from gateway.routing.select import Candidate, Decision
from gateway.types import Caller, Drafts, Inspected, Outcome, Spent, Usage


class RequestRecord(NamedTuple):
    """One finished request."""

    request_id: str
    outcome: Outcome
    status: int
    seconds: float
    code: str = ""
    """The error code for counters; empty without an error."""
    inspected: Inspected | None = None
    decision: Decision | None = None
    candidate: Candidate | None = None
    attempts: int = 0
    usage: Usage = Usage()
    waited_s: float = 0.0
    """Time in the queue for a slot."""
    added_s: float | None = None
    """From the whole body read to the request sent to the worker, without the queue."""
    first_token_s: float | None = None
    """From the whole body read to the first event with content, for streams."""
    token_s: float | None = None
    """For each token after the first one, for complete streams."""
    drafts: Drafts | None = None
    """As the worker reported them; None if it reported none."""
    caller: Caller = Caller()
    spent: Spent = Spent()
    """Zero without a key."""
    prefix: str = "none"
    """The cache result of the system prompt: hit, miss or none."""
