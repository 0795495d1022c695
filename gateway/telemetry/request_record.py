"""The record of a finished request, for accounting, access log and traces.

It is here because these may not import `proxy`, which makes it.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.routing.select import Candidate, Decision
from gateway.types import (
    NO_CALLER,
    NO_PREFIX,
    NOTHING,
    UNUSED,
    Caller,
    Drafts,
    Outcome,
    Spent,
    Usage,
)
from paceline.request.profile import RequestProfile


class RequestRecord(NamedTuple):
    """One finished request."""

    request_id: str
    outcome: Outcome = Outcome.COMPLETED
    status: int = 200
    seconds: float = 0.0
    address: str = ""
    """The address of the client, for the list of errors; empty without an error."""
    code: str = ""
    """The error code for counters; empty without an error."""
    reason: str = ""
    """The error in a sentence without text of a prompt; empty without an error."""
    profile: RequestProfile | None = None
    """None for a request that has not been inspected."""
    decision: Decision | None = None
    candidate: Candidate | None = None
    engine: str = ""
    """The kind of the engine, unless it is a worker of Paceline, which sends its own counts."""
    attempts: int = 0
    failovers: int = 0
    """How often it has continued at another worker."""
    usage: Usage = UNUSED
    waited_s: float = 0.0
    """Time in the queue for a slot."""
    added_s: float | None = None
    """From the whole body read to the request sent to the worker, without the queue."""
    first_token_s: float | None = None
    """From the whole body read to the first event with content, for streams."""
    token_s: float | None = None
    """For each token after the first one: at the worker, or of a complete stream as it comes."""
    drafts: Drafts | None = None
    """As the worker reported them; None if it reported none."""
    caller: Caller = NO_CALLER
    spent: Spent = NOTHING
    """Zero without a key."""
    prefix: str = NO_PREFIX
    """Whether the worker had a beginning of the prompt cached: hit, miss or none."""
    missed_reuse: str = ""
    """Why the worker read earlier turns again; empty if it did not."""
