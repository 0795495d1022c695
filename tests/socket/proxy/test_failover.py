"""Streams that go on at another worker after the one that began them has failed."""

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S
from gateway.proxy import forward, relay
from paceline.protocol import ANSWER_FIELD, PROGRESS_HEADER, TOKENS_LINE
from tests.support.fault_proxy import NO_FAULT, Fault, FaultProxy, running_proxy
from tests.support.gateway_fixtures import MakeGateway
from tests.support.raw_client import stream_error_code, wait_for_outcomes
from tests.support.running_gateway import RunningGateway, running_worker, wait_until
from tests.support.scripted_worker import (
    DONE,
    Script,
    ScriptedWorker,
    chunk,
    lane_report,
    stream_events,
    told_events,
)

Workers = tuple[ScriptedWorker, ScriptedWorker]
TOKENS = ("one", " two", " three")
WHOLE = [event.removesuffix(b"\n\n") for event in stream_events(TOKENS)]
USAGE = {"stream_options": {"include_usage": True}}
EVENTS = len(told_events(TOKENS, ""))


def events_of(received: bytes) -> list[bytes]:
    """Return the events without comments, and without what failovers and an early head add."""
    events = [one for one in received.split(b"\n\n") if one and not one.startswith(b":")]
    return [_without_failovers(event) for event in events]


def _without_failovers(event: bytes) -> bytes:
    if b"failovers" not in event:
        return event
    frame = json.loads(event.removeprefix(b"data: "))
    frame.pop("headers", None)
    frame.get("metrics", {}).pop("failovers", None)
    return b"data: " + json.dumps(frame, separators=(",", ":")).encode()


def join(gateway: RunningGateway, *workers: ScriptedWorker, models: str = "aaaa") -> None:
    """Let workers join; the first one is the least loaded. Each has a model of one letter."""
    for number, (worker, model) in enumerate(zip(workers, models, strict=False)):
        worker.fingerprint = model
        lanes = [lane_report(name, waiting=40 * number) for name in worker.lanes]
        gateway.join(worker, lanes=lanes)


def telling(**changes: Any) -> Script:
    return Script(tells_tokens=True, tokens=TOKENS, **changes)


def is_whole(gateway: RunningGateway, **fields: Any) -> bool:
    """Return whether a stream has all events of an answer that nothing has cut."""
    return events_of(gateway.chat(stream=True, **USAGE, **fields).content) == WHOLE


def error_code(gateway: RunningGateway, **fields: Any) -> str:
    return stream_error_code(gateway.chat(stream=True, **fields).content)


@pytest.fixture
def third_worker() -> Iterator[ScriptedWorker]:
    with running_worker("fake-c", script=telling()) as scripted:
        yield scripted


@pytest.fixture
def workers(worker: ScriptedWorker, second_worker: ScriptedWorker) -> Workers:
    """Return a worker whose streams end after two events, and one that can go on with them."""
    worker.script, second_worker.script = telling(cut_after=2), telling()
    return worker, second_worker


def test_f03_a_stream_cut_at_any_event_goes_on(gateway: RunningGateway, workers: Workers) -> None:
    first, second = workers
    gateway.join(second)
    for events in range(EVENTS + 1):
        first.script = telling(cut_after=events)
        second.requests.clear()
        gateway.remove_worker(first)
        first.boot_id = f"boot-{events}"  # a new boot has no failures
        join(gateway, first, second)
        received = gateway.chat(stream=True, **USAGE).content
        assert events_of(received) == WHOLE, events
        assert received.endswith(DONE)
        assert b": t" not in received
        # Without the end mark alone, there is nothing left for another worker.
        assert len(second.requests) == (events < EVENTS - 1)
        if 0 < events < EVENTS - 1:
            assert b": x-paceline-failovers: 1\n" in received
            assert b": x-paceline-worker: fake-b\n" in received
            assert b'"failovers":1' in received
            so_far = second.requests[0].body[ANSWER_FIELD]
            assert so_far.count(";") == events - 1
    wait_for_outcomes(gateway, completed=EVENTS + 1)
    assert gateway.status()["failovers"] == EVENTS - 1


def test_f03_a_stream_cut_at_any_byte_goes_on(gateway, workers, proxy) -> None:
    first, second = workers
    first.script = telling()
    sizes = [len(event) for event in told_events(TOKENS, "")]
    for at in range(90, 100 + sum(sizes), 31):
        proxy.fault = NO_FAULT
        gateway.remove_worker(first)
        first.boot_id = f"boot-{at}"
        join(gateway, first, second)
        proxy.reset_all()
        proxy.fault = Fault(reset_after_bytes=at)
        assert is_whole(gateway), at


def test_f03_a_stream_outlives_two_workers_and_no_third_one(gateway, workers, third_worker) -> None:
    first, second = workers
    second.script = first.script
    with running_worker("fake-d", script=telling()) as fourth:
        join(gateway, first, second, third_worker)
        received = gateway.chat(stream=True, **USAGE).content
        assert events_of(received) == WHOLE
        assert b": x-paceline-failovers: 2\n" in received
        assert len(third_worker.requests) == 1
        third_worker.script = telling(cut_after=0)
        join(gateway, first, second, third_worker, fourth)
        again = [{"role": "user", "content": "Again."}]
        assert error_code(gateway, messages=again) == "worker_lost"
        assert fourth.requests == []


def test_f03_a_call_goes_on_within_its_arguments(gateway, workers) -> None:
    """What the second worker sends has no name and no id, as the client has these."""
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]
    calls += [{"function": {"arguments": piece}} for piece in ('{"k"', ":1", "}")]
    deltas: list[dict[str, Any]] = [
        {"role": "assistant"},
        *({"tool_calls": [{"index": 0} | one]} for one in calls),
    ]
    events = [*(chunk(delta) for delta in deltas), chunk({}, "tool_calls")]
    lines = ["0 @1", "0 0", "0 1", "0 2", "0 3", "0 ."]
    told = [b"".join((TOKENS_LINE, line.encode(), b"\n", event))
            for line, event in zip(lines, events, strict=True)]  # fmt: skip
    first, second = workers
    for cut in range(1, len(events)):
        first.script = Script(events=(*told,), cut_after=cut)
        second.script = Script(events=(*told[cut:], DONE))
        gateway.remove_worker(first)
        first.boot_id = f"boot-{cut}"
        join(gateway, first, second)
        received = gateway.chat(stream=True, tools=[function]).content
        assert events_of(received)[:-1] == [one.removesuffix(b"\n\n") for one in events], cut
        assert received.endswith(DONE)


def test_f03_only_a_worker_with_the_same_model_goes_on(gateway, workers, third_worker) -> None:
    join(gateway, *workers, models="ab")
    assert error_code(gateway) == "worker_lost"
    join(gateway, *workers, third_worker, models="aba")
    assert is_whole(gateway)
    assert workers[1].requests == []
    assert len(third_worker.requests) == 1
    lanes = gateway.status()["workers"]["fake-b"]["lanes"].values()
    assert [lane["in_flight"] for lane in lanes] == [0, 0], "it gives the slot back"


def test_f05_three_missed_comments_of_a_worker_are_a_stall(gateway, workers, monkeypatch) -> None:
    """Whatever longer pauses the settings allow other engines, also before the first event."""
    assert forward._STALLED_S == 31
    monkeypatch.setattr(forward, "_STALLED_S", 0.5)
    join(gateway, *workers)
    for events in (0, 2):
        workers[0].script = telling(hang_after=events)
        assert is_whole(gateway)
        wait_until(lambda: workers[0].in_flight == 0)


def test_a_stream_whose_worker_sends_neither_bytes_nor_heartbeats_goes_on(
    make_gateway: MakeGateway, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before it stalls; the registry tests when heartbeats have ceased."""
    assert HEARTBEAT_TIMEOUT_S == 7
    monkeypatch.setattr(forward, "HEARTBEAT_TIMEOUT_S", 0.1)
    gateway = make_gateway(check_s=0.05)
    first, second = workers
    first.script = telling(hang_after=2)
    join(gateway, *workers)
    with gateway.stream(**USAGE) as response:
        pieces = response.iter_raw()
        received = next(pieces)
        monkeypatch.setattr(WorkerRegistry, "silent_urls", lambda _: (first.url,))
        received += b"".join(pieces)
    assert events_of(received) == WHOLE
    assert len(second.requests) == 1


def test_a_stream_whose_lines_are_too_long_to_keep_ends_in_an_error(
    make_gateway: MakeGateway, workers: Workers, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert relay._LINES_LIMIT_BYTES == 4 << 20
    monkeypatch.setattr(relay, "_LINES_LIMIT_BYTES", 2)
    bounded, bound = threading.Event(), relay.StreamRelay.bound_progress

    def bound_progress(one: relay.StreamRelay) -> None:
        bound(one)
        bounded.set()

    monkeypatch.setattr(relay.StreamRelay, "bound_progress", bound_progress)
    gateway = make_gateway(check_s=0.05)
    first, second = workers
    first.script = telling(hang_after=3)
    join(gateway, first, second)
    with gateway.stream(**USAGE) as response:
        pieces = response.iter_raw()
        received = b""
        while b"two" not in received:
            received += next(pieces)
        bounded.clear()
        assert bounded.wait(30), "each time that limits are checked"
        proxy.reset_all()
        received += b"".join(pieces)
    assert stream_error_code(received) == "worker_lost"
    assert second.requests == []


def test_f18_a_stream_whose_worker_reports_an_error_goes_on(gateway, workers) -> None:
    begin = told_events(TOKENS, "")[:2]
    workers[0].script = Script(events=(*begin, b'data: {"error": {"message": "boom"}}\n\n'))
    join(gateway, *workers)
    assert is_whole(gateway)


@pytest.fixture
def small_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no body of 100 kB go on elsewhere; the limit is larger."""
    monkeypatch.setattr(forward, "_FAILOVER_LIMIT_BYTES", 100_000)


@pytest.mark.usefixtures("small_bodies")
@pytest.mark.parametrize(
    ("script", "fields", "told"),
    [
        pytest.param(Script(cut_after=2), {}, True, id="its worker tells no tokens"),
        pytest.param(
            telling(cut_after=2),
            {"messages": [{"role": "user", "content": "x" * 100_000}]},
            False,
            id="its body is larger than the limit",
        ),
    ],
)
def test_f03_a_stream_that_nobody_can_go_on_with_ends_in_an_error(
    gateway: RunningGateway, workers: Workers, script: Script, fields: dict[str, Any], told: bool
) -> None:
    first, second = workers
    first.script = script
    join(gateway, *workers)
    assert error_code(gateway, **fields) == "worker_lost"
    assert (PROGRESS_HEADER in first.requests[0].headers) is told
    assert second.requests == []


def test_f03_a_policy_may_let_no_stream_go_on(gateway, workers, admin) -> None:
    join(gateway, *workers)
    assert admin.patch({"retries": {"per_request": 0}}).is_success
    assert error_code(gateway) == "worker_lost"


def test_f49_a_drain_moves_streams_if_asked(gateway: RunningGateway, workers: Workers) -> None:
    """Ordered failures count neither for the limit nor for the quarantine or the breaker."""
    first, second = workers
    first.script = telling(hang_after=3)
    join(gateway, first, second)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(gateway.stream(**USAGE)) for _ in range(3)]
        pieces = [stream.iter_raw() for stream in streams]
        received = [next(piece) for piece in pieces]
        path = "/admin/v1/workers/fake-a/drain?timeout_s=10&move=true"
        drained = gateway.admin.post(path).raise_for_status().json()
        assert (drained["drained"], drained["moved"]) == (True, 3)
        rest = [b"".join(piece) for piece in pieces]
    for begin, end in zip(received, rest, strict=True):
        assert events_of(begin + end) == WHOLE
    assert len(second.requests) == 3
    assert gateway.status()["workers"]["fake-a"]["state"] == "cordoned"
    assert gateway.metric("quarantined_bodies") == 0
    wait_for_outcomes(gateway, completed=3)


def test_f49_a_drain_moves_no_stream_that_no_other_worker_takes(gateway, workers) -> None:
    first, _ = workers
    first.script = telling(hang_after=3)
    join(gateway, first)
    with gateway.stream(**USAGE) as stream:
        pieces = stream.iter_raw()
        received = next(pieces)
        path = "/admin/v1/workers/fake-a/drain?timeout_s=0&move=true"
        drained = gateway.admin.post(path).raise_for_status().json()
        assert (drained["drained"], drained["moved"]) == (False, 0)
        first.resume.set()
        received += b"".join(pieces)
    assert events_of(received) == WHOLE


@pytest.mark.parametrize("order", ["leave", "drain", "move"])
def test_f49_deaths_of_workers_that_somebody_stops_do_not_count(
    gateway: RunningGateway, third_worker: ScriptedWorker, order: str
) -> None:
    """A stream outlives three of them, and its body stays out of quarantine."""
    with contextlib.ExitStack() as stack:
        leaving = [
            stack.enter_context(running_worker(f"leaving-{at}", script=telling(hang_after=events)))
            for at, events in enumerate((2, 0, 0))
        ]
        proxies = [stack.enter_context(running_proxy(member.url)) for member in leaving]
        for member, proxy in zip(leaving, proxies, strict=True):
            member.url = proxy.url
        third_worker.script = telling(hang_after=0)
        join(gateway, leaving[0])
        pieces = stack.enter_context(gateway.stream(**USAGE)).iter_raw()
        received = next(pieces)
        for at, proxy in enumerate(proxies):
            following = (*leaving, third_worker)[at + 1]
            join(gateway, following)
            if order == "leave":
                gateway.remove_worker(leaving[at])
            elif order == "drain":
                gateway.join(leaving[at], draining=True)
            else:
                path = f"/admin/v1/workers/leaving-{at}/drain?timeout_s=0&move=true"
                gateway.admin.post(path).raise_for_status()
            proxy.reset_all()
            assert following.request_received.wait(60)
            assert gateway.metric("quarantined_bodies") == 0
        third_worker.resume.set()
        received += b"".join(pieces)
    assert events_of(received) == WHOLE
    assert b'"failovers":3' in received


def test_another_worker_gets_the_seed_of_the_first_one(gateway, workers) -> None:
    join(gateway, *workers)
    assert is_whole(gateway, temperature=1.0)
    seeds = [worker.requests[0].body["seed"] for worker in workers]
    assert seeds[0] == seeds[1]
    assert isinstance(seeds[0], int)
    gateway.chat(temperature=1.0)
    drawn = {request.body["seed"] for worker in workers for request in worker.requests}
    assert len(drawn) == 2, "each request has its own"
    gateway.chat(temperature=1.0, seed=5)
    gateway.chat(temperature=0)
    sent = [request.body.get("seed") for worker in workers for request in worker.requests]
    assert {5, None} < set(sent)


def test_a_client_cannot_begin_an_answer_for_a_worker(gateway, workers) -> None:
    join(gateway, *workers)
    response = gateway.chat(**{ANSWER_FIELD: "0 @1"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ANSWER_FIELD


def test_the_death_of_a_stream_counts_for_the_quarantine(gateway, workers) -> None:
    first, second = workers
    second.script = first.script
    join(gateway, *workers)
    assert error_code(gateway) == "worker_lost"
    assert gateway.metric("quarantined_bodies") == 1
    assert gateway.chat(stream=True).json()["error"]["code"] == "request_quarantined"
