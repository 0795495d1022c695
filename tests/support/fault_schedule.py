"""A seeded schedule of faults of workers and connections, and of disconnects of clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from random import Random

from tests.support.fault_proxy import NO_FAULT, Fault
from tests.support.scripted_worker import DONE, Script, chunk, event, stream_events, usage_chunk

WORDS = ("one", " two", " three")
COMPLETION_TOKENS = 3
"""In the usage of every answer of the scripted worker that has one."""
_EVENTS = len(stream_events(WORDS))
_HEAD = stream_events(())[0]
# A busy worker receives no request for at least a second; with more, no worker would be left.
_BUSY_SHARE = 0.01
_RETRY_AFTER = (
    b"0",
    b"1",
    b"-5",
    b"soon",
    b"Wed, 21 Oct 2015 07:28:00 GMT",
    b"99999999999999999999x",
)


class ClientBehavior(Enum):
    WAITS = auto()
    DISCONNECTS_AT_ONCE = auto()
    """The client sends its request and closes the connection."""
    DISCONNECTS_LATER = auto()
    DISCONNECTS_DURING_THE_ANSWER = auto()
    """The client closes the connection after the first bytes of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One planned request; the text of its message identifies it."""

    identity: str
    stream: bool
    temperature: int
    behavior: ClientBehavior
    disconnect_after_s: float
    script: Script
    at_one_worker: bool
    """Only one worker follows the script; the others answer normally."""


def plan_requests(rng: Random, count: int) -> list[PlannedRequest]:
    """Return planned requests; the same generator gives the same ones."""
    return [_plan(rng, number) for number in range(count)]


def _plan(rng: Random, number: int) -> PlannedRequest:
    behavior = ClientBehavior.WAITS
    if rng.random() < 0.2:
        behavior = rng.choice(
            [behavior_ for behavior_ in ClientBehavior if behavior_ is not ClientBehavior.WAITS]
        )
    script = _script(rng)
    return PlannedRequest(
        identity=f"request {number}",
        stream=rng.random() < 0.7,
        temperature=rng.randrange(2),
        behavior=behavior,
        disconnect_after_s=rng.uniform(0.0, 0.1),
        script=script,
        at_one_worker=script.status in (429, 503),
    )


def _script(rng: Random) -> Script:
    """Return a script for a worker: mostly a normal answer, else a fault."""
    chance = rng.random()
    if chance < _BUSY_SHARE:
        headers = ((b"retry-after", rng.choice(_RETRY_AFTER)),)
        return Script(status=rng.choice((429, 503)), headers=headers)
    if chance < 0.7:
        return Script(tokens=WORDS)
    event_count = rng.randrange(_EVENTS + 1)
    scripts = (
        Script(tokens=WORDS, cut_after=event_count),
        Script(tokens=WORDS, end_after=event_count),
        Script(tokens=WORDS, hang_after=event_count),
        Script(tokens=WORDS, http_1_0=True, cut_after=event_count),
        Script(tokens=WORDS, http_1_0=True),
        Script(tokens=WORDS, pause_s=rng.uniform(0.0, 0.03)),
        Script(tokens=WORDS, drop_reused=True),
        Script(hang=True),
        Script(drop=True),
        Script(status=500, body=b'{"error": {"message": "boom"}}'),
        Script(status=404, body=b"not here"),
        Script(body=b"<html>not JSON</html>"),
        Script(body=b'{"error": {"message": "sorry"}}'),
        Script(raw=b"nothing like HTTP\r\n\r\n"),
        Script(events=(_HEAD, event({"error": {"message": "boom"}}), DONE)),
        Script(events=(_HEAD, b"data: {oops\n\n", DONE)),
        Script(events=(_HEAD, DONE)),
        Script(events=(b": hello\n\n", *stream_events(WORDS), b": bye\n\n")),
        Script(events=(_HEAD, chunk({}, "stop"), chunk({}, "length"), usage_chunk(), DONE)),
        Script(events=(b"".join(stream_events(WORDS)),)),
    )
    return rng.choice(scripts)


class WorkerFault(Enum):
    NONE = auto()
    REFUSES = auto()
    RESET = auto()
    """All its connections are reset."""
    WIRE = auto()
    """Its next connections have a fault."""
    LEAVES = auto()
    """The worker leaves the fleet, and finishes its answers."""
    RESTARTS = auto()
    """Its process ends with all its answers, and a new one starts at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEvent:
    """A fault of one worker, and its duration."""

    worker_index: int
    kind: WorkerFault
    duration_s: float
    fault: Fault = NO_FAULT


def draw_fault(rng: Random, workers: Sequence[object]) -> FaultEvent:
    size = rng.randrange(1, 2000)
    faults = (
        Fault(reset_after_bytes=size),
        Fault(end_after_bytes=size),
        Fault(stall_after_bytes=size),
        Fault(drip_bytes=1 + size // 20),
        Fault(blackhole=True),
        Fault(reset_at_connect=True),
    )
    return FaultEvent(
        worker_index=rng.randrange(len(workers)),
        kind=rng.choice(list(WorkerFault)),
        duration_s=rng.uniform(0.05, 0.3),
        fault=rng.choice(faults),
    )
