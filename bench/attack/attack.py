"""An attack, its target, and the tally of its inputs."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

from bench.attack.liar import LyingServer

LOAD_CODES: Final = frozenset(
    "queue_full queue_timeout gateway_overloaded workers_busy no_worker "
    "overloaded_error timeout_error".split()
)
"""Codes of 5xx responses that any load may cause."""
WORKER_CODES: Final = frozenset(
    "worker_failed worker_lost worker_timeout worker_stalled worker_unreachable api_error "
    "response_too_large".split()
)
"""Codes of 5xx responses that only a worker that lies or is killed may cause."""
_LAST_EVENTS: Final = {
    "/v1/messages": (b"message_stop",),
    "/v1/responses": (b"response.completed", b"response.incomplete", b"response.failed"),
}
"""Names of the events that end a stream, by path."""
_SHOWN_CHARS: Final = 600
_FAILURES_LIMIT: Final = 5


@dataclass
class Tally:
    """The inputs of an attack, the answers, and each promise that did not hold."""

    name: str
    inputs: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    ours: int = 0
    """Answers with a 5xx that is a defect of ours."""
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    """The first failures, each with its input."""
    notes: list[str] = field(default_factory=list)
    begun: list[tuple[float, str]] = field(default_factory=list)
    """When inputs began that may take long, by the monotonic clock, and what they are."""

    def begin(self, given: str) -> None:
        """Count an input that may take long."""
        self.inputs += 1
        self.begun.append((time.monotonic(), given))

    def input_at(self, moment_s: float) -> str:
        """Return the last input that had begun at a moment."""
        return next((given for at_s, given in reversed(self.begun) if at_s <= moment_s), "")

    def fail(self, problem: str, given: object) -> None:
        """Record a promise that did not hold, with the input that shows it."""
        self.failed += 1
        if len(self.failures) < _FAILURES_LIMIT:
            self.failures.append(f"{problem}\n    input: {given!r}"[:_SHOWN_CHARS])

    def answer(self, answer: Answer, given: object, *, allowed: Collection[str] = ()) -> None:
        """Count an answer by its class; `allowed` are the codes of 5xx beside those of load.

        A 5xx is ours if its status is 500, if its body is no error in the shape of OpenAI or of
        Anthropic, or if its code is neither one of load nor one that this attack may cause. An
        error below 500 must have such a shape too.
        """
        if not answer.status:
            self.answers["none"] += 1
            return
        code = answer.code
        if answer.status >= 500:
            documented = answer.status != 500 and (code in LOAD_CODES or code in allowed)
            self.answers[f"{answer.status} {code or 'untyped'}"] += 1
            if not documented:
                self.ours += 1
                self.fail(f"{answer.status} {code or 'untyped'}", given)
            return
        self.answers[f"{answer.status // 100}xx"] += 1
        if answer.status >= 400 and not code:
            self.fail(f"{answer.status} without an error in OpenAI's shape", given)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response; status 0 means that the connection ended without one."""

    status: int = 0
    body: bytes = b""
    complete: bool = False

    @property
    def code(self) -> str:
        """Return the code of an error in OpenAI's shape, or the type of one in Anthropic's."""
        try:
            answer = json.loads(self.body)
            error = answer["error"]
            if error.keys() == {"message", "type", "param", "code"}:
                return str(error["code"] or error["type"])
            if answer["type"] == "error" and error.keys() == {"message", "type"}:
                return str(error["type"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        return ""

    @property
    def streamed(self) -> bool:
        """Return whether the body is a stream of events, however odd its first lines are."""
        return not self.body.startswith((b"{", b"["))

    @property
    def stream_error(self) -> str:
        """Return the code of the error event that ends a stream, or an empty string."""
        events = self.body.rstrip(b"\n").split(b"\n\n") if self.streamed else []
        for event in events[-2:]:  # the failed response comes behind its error
            name, _, data = event.rpartition(b"data: ")
            if b"event: error" in name or data.startswith(b'{"error":'):
                try:
                    answer = json.loads(data)
                except ValueError:
                    return "an error that is no JSON"
                return Answer(200, data).code or str(answer.get("code") or "untyped")
        return ""

    def ends_as(self, path: str) -> bool:
        """Return whether a stream ends as a complete one of this route."""
        last = _LAST_EVENTS.get(path)
        if last is None:
            return self.done
        *_, event = self.body.rstrip(b"\n").split(b"\n\n")
        return event.startswith(tuple(b"event: " + name for name in last))

    @property
    def done(self) -> bool:
        """Return whether a stream of OpenAI ends as a complete one."""
        return self.body.endswith(b"data: [DONE]\n\n")

    def json(self) -> Any:
        """Parse the body as strict JSON in UTF-8."""
        return json.loads(self.body.decode(), parse_constant=_reject)


def _reject(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@dataclass(kw_only=True)
class Target:
    """The processes under attack, and what their attacker knows."""

    gateway_port: int
    worker_port: int
    liar: LyingServer
    gateway_pid: int
    worker_pid: int
    join_token: str
    admin_key: str
    key: str
    """A key without limits."""
    key_id: str
    home: Path
    """A folder for the processes and files that an attack starts of its own."""
    sent: set[str] = field(default_factory=set)
    """Ids of the requests to the data plane whose answer has begun."""
    read: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Prompt and completion tokens in whole answers of the honest worker, by request."""
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def request_id(self, name: str) -> str:
        """Return a new id for a request of an attack."""
        return f"attack-{name}-{next(self._ids)}"


class Attack(Protocol):
    """One kind of attack."""

    @property
    def name(self) -> str:
        """The name in the table, and for `--only`."""
        ...

    @property
    def promise(self) -> str:
        """What must hold under the attack."""
        ...

    @property
    def share(self) -> float:
        """Its share of the time."""
        ...

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        """Play inputs until the deadline on the monotonic clock; count them in the tally."""
        ...


async def play(
    one: Callable[[Random], Awaitable[None]], rng: Random, deadline_s: float, *, concurrency: int
) -> None:
    """Play one input after another until the deadline; the n-th depends on the seed and n alone."""
    seed, numbers = rng.getrandbits(64), itertools.count()

    async def play_until_deadline() -> None:
        while time.monotonic() < deadline_s:
            await one(Random(f"{seed}/{next(numbers)}"))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(play_until_deadline())
