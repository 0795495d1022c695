"""A seeded schedule of faults: what requests meet, what their clients do, what befalls the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from random import Random

from tests.support.fault_proxy import NO_FAULT, Fault
from tests.support.scripted_worker import DONE, Script, chunk, event, stream_events, usage_chunk

WORDS = ("one", " two", " three")
COMPLETION_TOKENS = 3
"""Told by every answer of the fake worker that tells usage at all."""
_EVENTS = len(stream_events(WORDS))
_HEAD = stream_events(())[0]
# A worker that asks to be left alone is, for a second at least: with more, nobody would be asked.
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
    """What a client does."""

    STAYS = auto()
    LEAVES_AT_ONCE = auto()
    """It sends its request and closes the connection."""
    LEAVES_LATER = auto()
    LEAVES_IN_THE_ANSWER = auto()
    """It closes the connection behind the first bytes that it got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request: its identity is the text of its message."""

    identity: str
    stream: bool
    temperature: int
    manners: ClientBehavior
    patience_s: float
    script: Script
    at_one: bool
    """Only one worker answers so, the others well."""


def plan_requests(rng: Random, count: int) -> list[PlannedRequest]:
    """Plan so many requests; the same generator gives the same ones."""
    return [_plan(rng, number) for number in range(count)]


def _plan(rng: Random, number: int) -> PlannedRequest:
    manners = ClientBehavior.STAYS
    if rng.random() < 0.2:
        manners = rng.choice([each for each in ClientBehavior if each is not ClientBehavior.STAYS])
    script = _script(rng)
    return PlannedRequest(
        identity=f"request {number}",
        stream=rng.random() < 0.7,
        temperature=rng.randrange(2),
        manners=manners,
        patience_s=rng.uniform(0.0, 0.1),
        script=script,
        at_one=script.status in (429, 503),
    )


def _script(rng: Random) -> Script:
    """Choose how a worker answers: mostly well, else failing or odd."""
    chance = rng.random()
    if chance < _BUSY_SHARE:
        told = ((b"retry-after", rng.choice(_RETRY_AFTER)),)
        return Script(status=rng.choice((429, 503)), headers=told)
    if chance < 0.7:
        return Script(tokens=WORDS)
    place = rng.randrange(_EVENTS + 1)
    ways = (
        Script(tokens=WORDS, cut_after=place),
        Script(tokens=WORDS, end_after=place),
        Script(tokens=WORDS, hang_after=place),
        Script(tokens=WORDS, http_1_0=True, cut_after=place),
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
    return rng.choice(ways)


class WorkerFault(Enum):
    """What befalls one worker."""

    NONE = auto()
    REFUSES = auto()
    RESET = auto()
    """All its connections are reset at once."""
    WIRE = auto()
    """Its next connections have a fault."""
    LEAVES = auto()
    """It says goodbye, while its answers go on."""
    RESTARTS = auto()
    """Its process ends with all its answers, and a new one is there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEvent:
    """One blow, and how long it lasts."""

    place: int
    blow: WorkerFault
    lasts_s: float
    fault: Fault = NO_FAULT


def draw_fault(rng: Random, workers: Sequence[object]) -> FaultEvent:
    """Choose what happens next."""
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
        place=rng.randrange(len(workers)),
        blow=rng.choice(list(WorkerFault)),
        lasts_s=rng.uniform(0.05, 0.3),
        fault=rng.choice(faults),
    )
