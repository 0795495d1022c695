"""Invariants under any schedule of faults, and the classification of responses."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from logging import LogRecord
from typing import Any

from tests.support.fault_schedule import COMPLETION_TOKENS, PlannedRequest
from tests.support.scripted_worker import DONE, Script, ScriptedWorker

COMPLETE = "complete"
DISCONNECTED = "disconnected"


def classify_response(received: bytes, plan: PlannedRequest) -> str:
    """Return how an answer ended; fail if it ended in no known way."""
    head, _, rest = received.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" in head.lower():
        rest = _unchunked(rest)
    if status != 200:
        return str(json.loads(rest)["error"]["code"])
    if not plan.stream:
        assert json.loads(rest)["choices"], "a response with status 200 has choices"
        return COMPLETE
    *_, last, remainder = rest.split(b"\n\n")
    assert remainder == b"", "the gateway sends no partial event"
    if last + b"\n\n" == DONE or (last.startswith(b":") and DONE in rest):
        assert b'"error":' not in rest
        return COMPLETE
    assert DONE not in rest, "an error event neither follows nor precedes the end"
    return str(json.loads(last.removeprefix(b"data: "))["error"]["code"])


def _unchunked(chunked: bytes) -> bytes:
    body = b""
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        length = int(size, 16)
        body, chunked = body + chunked[:length], chunked[length + 2 :]
        if not length:
            return body
    raise AssertionError("the answer has no end")


def check_responses(planned: list[PlannedRequest], ends: dict[str, str]) -> None:
    """I4: every client received a known end, and only complete answers look complete."""
    errors = {
        *("worker_lost", "worker_failed", "worker_timeout", "worker_stalled"),
        *("worker_unreachable", "workers_busy", "no_worker", "queue_full", "queue_timeout"),
        "gateway_overloaded",  # if the machine is too slow for this load
    }
    assert set(ends.values()) <= errors | {COMPLETE, DISCONNECTED}, Counter(ends.values())
    complete = [plan for plan in planned if ends[plan.identity] == COMPLETE]
    assert len(complete) > len(ends) / 10, Counter(ends.values())
    wrong = [plan for plan in complete if not plan.at_one_worker and _cannot_answer(plan.script)]
    assert wrong == []


def _cannot_answer(script: Script) -> bool:
    return script.hang or script.drop or script.raw is not None or script.status != 200


def check_counts(status: dict[str, Any], ends: dict[str, str]) -> None:
    """I2: each request is settled exactly once, with the outcome at its client; tokens add up."""
    outcomes, errors = status["outcomes"], status["errors"]
    expected = Counter(ends.values())
    assert sum(outcomes.values()) == len(ends)
    disconnected = expected[DISCONNECTED]
    # A disconnected client did not receive its end, which may have been any.
    assert 0 <= outcomes["completed"] - expected[COMPLETE] <= disconnected
    assert outcomes.get("client_left", 0) <= disconnected
    for code, count in errors.items():
        assert 0 <= count - expected[code] <= disconnected, code
    tokens = status["models"]["demo"]["tokens"]["completion"]
    assert tokens % COMPLETION_TOKENS == 0
    assert outcomes["completed"] <= tokens / COMPLETION_TOKENS <= len(ends)


def check_generations(workers: Sequence[ScriptedWorker], log: Iterable[LogRecord]) -> None:
    """I3: a body that crashes workers reaches two of them at most.

    The gateway cannot know of a crash after its time for an answer, and one of a worker that
    leaves is not the fault of a body: each such attempt, which the log names, allows one worker
    more.
    """
    allowed: Counter[str] = Counter()
    losses: Counter[str] = Counter()
    for record in log:
        if record.msg.startswith("attempt.failed"):
            assert isinstance(record.args, tuple)
            request, _, code, ordered, _ = record.args
            if ordered or code == "worker_timeout":
                allowed[str(request)] += 1
            elif code == "worker_lost":
                losses[str(request)] += 1
    crashed: defaultdict[str, set[str]] = defaultdict(set)
    for worker in workers:
        for received in worker.requests:
            identity = received.body["messages"][-1]["content"]
            if worker.scripts_by_message.get(identity, worker.script).drop:
                crashed[received.headers["x-request-id"]].add(worker.worker_id)
    assert crashed, "some bodies crash workers"
    assert {request for request in crashed if losses[request] > 2} == set()
    reached = {request: len(ids) - allowed[request] for request, ids in crashed.items()}
    assert {request: count for request, count in reached.items() if count > 2} == {}
