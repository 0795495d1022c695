"""An attack, its target, and the tally of its inputs."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

from bench.attack.http_client import CHAT, MESSAGES, RESPONSES, Answer, encode, send
from bench.attack.liar import LyingServer
from bench.harness.parts import ADMIN_KEY

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
EXPLAIN: Final = "/v1/route/explain"
COUNT_TOKENS: Final = f"{MESSAGES}/count_tokens"
INPUT_TOKENS: Final = f"{RESPONSES}/input_tokens"
_UNCOUNTED: Final = (EXPLAIN, COUNT_TOKENS, INPUT_TOKENS)
"""Routes without a line in the access log."""
_SHOWN_CHARS: Final = 600
_FAILURES_LIMIT: Final = 5


@dataclass
class Tally:
    """The inputs of an attack, the answers, and each promise that did not hold."""

    name: str
    promise: str
    inputs: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    ours: int = 0
    """Answers with a 5xx that is a defect of ours."""
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    """The first failures, each with its input."""
    notes: list[str] = field(default_factory=list)
    begun: list[tuple[float, str]] = field(default_factory=list)
    """When inputs began, by the monotonic clock, and what they are."""

    def begin(self, given: object) -> None:
        self.inputs += 1
        self.begun.append((time.monotonic(), f"{given!s:.120}"))

    def input_at(self, moment_s: float) -> str:
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
        code = answer.code
        if not answer.status:
            self.answers["none"] += 1
        elif answer.status >= 500:
            documented = answer.status != 500 and (code in LOAD_CODES or code in allowed)
            self.answers[f"{answer.status} {code or 'untyped'}"] += 1
            if not documented:
                self.ours += 1
                self.fail(f"{answer.status} {code or 'untyped'}", given)
        else:
            self.answers[f"{answer.status // 100}xx"] += 1
            if answer.status >= 400 and not code:
                self.fail(f"{answer.status} without an error in OpenAI's shape", given)


@dataclass(kw_only=True)
class Target:
    """The processes under attack, and what their attacker knows."""

    gateway_port: int
    worker_port: int
    liar: LyingServer
    key: str
    """A key without limits."""
    home: Path
    """A folder for the processes and files that an attack starts of its own."""
    prepared_key: str = ""
    """The id of the key whose answers are prepared: no tokens of the attacked worker."""
    sent: set[str] = field(default_factory=set)
    """Ids of the requests to the data plane whose answer has begun."""
    read: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Prompt and completion tokens in whole answers of the honest worker, by request."""
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def request_id(self, name: str) -> str:
        return f"attack-{name.replace(' ', '-')}-{next(self._ids)}"

    async def admin(self, path: str, body: Any = None, method: str = "") -> Answer:
        return await self.request(f"/admin/v1/{path}", body, method=method, key=ADMIN_KEY)

    async def request(
        self, path: str, body: Any = None, *, method: str = "", key: str = ""
    ) -> Answer:
        """Send a request to a route other than inference."""
        return await request(self.gateway_port, path, body, method=method, key=key)

    async def create_key(self, name: str, **terms: Any) -> dict[str, Any]:
        answer = await self.admin("keys", {"name": f"{name} {next(self._ids)}", **terms})
        if answer.status != 201:
            raise RuntimeError(f"no key: {answer.status} {answer.body[:200]!r}")
        return dict(answer.json())


async def request(
    port: int, path: str, body: Any = None, *, method: str = "", key: str = ""
) -> Answer:
    encoded = None if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    return await send(port, encode(encoded, path=path, method=method, key=key))


class Attack:
    """One kind of attack: inputs, some at a time, until the deadline on the monotonic clock."""

    name: ClassVar[str]
    """In the table, and for `--only`."""
    promise: ClassVar[str]
    """What must hold under the attack."""
    share: ClassVar[float]
    """Its share of the time."""
    concurrency: ClassVar[int] = 8

    def __init__(self, target: Target, tally: Tally, rng: Random, deadline_s: float) -> None:
        self.target = target
        self.tally = tally
        self.rng = rng
        self.deadline_s = deadline_s

    async def run(self) -> None:
        """Play one input after another; the n-th depends on the seed and n alone."""
        await self.prepare()
        seed, numbers = self.rng.getrandbits(64), itertools.count()

        async def play() -> None:
            while time.monotonic() < self.deadline_s:
                await self.one(Random(f"{seed}/{next(numbers)}"))

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(play())
        await self.finish()

    async def prepare(self) -> None:
        """Do what comes before the first input."""

    async def one(self, chance: Random) -> None:
        """Play one input, and count it; nothing for a kind that has a `run` of its own."""

    async def finish(self) -> None:
        """Do what comes behind the last input."""

    async def ask(
        self,
        body: Any,
        path: str = CHAT,
        *,
        key: str = "",
        given: object = None,
        honest: bool = False,
        allowed: Collection[str] = (),
    ) -> Answer:
        """Send a request of a client with an id, and count it, its answer and its usage.

        An `honest` worker reports the usage.
        """
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        request_id = self.target.request_id(self.name)
        self.tally.begin(f"{path}, {len(raw):,} bytes: {given or raw[:99]!r}")
        sent = encode(raw, path=path, key=key or self.target.key, request_id=request_id)
        answer = await send(self.target.gateway_port, sent)
        if answer.status and path not in _UNCOUNTED:
            self.target.sent.add(request_id)
        if honest and answer.status == 200 and not answer.streamed:
            self.target.read[request_id] = answer.tokens()
        self.tally.answer(answer, given or (path, raw), allowed=allowed)
        return answer

    def count(
        self, status: int, body: bytes, given: object, *, allowed: Collection[str] = ()
    ) -> None:
        """Count an answer by its status, whatever its body: only a 5xx must name its cause."""
        if status >= 500 or not status:
            self.tally.answer(Answer(status, body), given, allowed=allowed)
        else:
            self.tally.answers[f"{status // 100}xx"] += 1

    def check(self, answer: Answer, path: str, given: object) -> None:
        """Require that an answer of an honest worker has its end."""
        if problem := answer.problem(path):
            self.tally.fail(problem, (path, given, answer.body[-200:]))
