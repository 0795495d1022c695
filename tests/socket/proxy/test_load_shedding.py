"""Load shedding: requests that an overloaded gateway rejects."""

import contextlib
import functools
import time

import httpx
import pytest

from gateway import app
from gateway.assembly import LOOP_CHECK_S
from gateway.proxy import load_shedding as overload
from gateway.proxy.load_shedding import LoopLag, RejectionPacer
from gateway.responses.exchange import ResponseExchange
from tests.support.fake_clock import FakeClock
from tests.support.gateway_fixtures import MakeGateway
from tests.support.raw_client import raw_client, request_bytes
from tests.support.running_gateway import RunningGateway, chat_body, status_and_code, wait_until
from tests.support.scripted_worker import DONE, ScriptedWorker

CHAT = "/v1/chat/completions"


def test_f27_c16_requests_and_explanations_over_the_limit_are_shed_and_running_ones_complete(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    gateway = make_gateway(worker, requests_limit=1)
    with gateway.stream() as running:
        chunks = running.iter_raw()
        received = next(chunks)
        shed = gateway.client.post(CHAT, json={})
        assert status_and_code(shed) == (503, "gateway_overloaded")
        assert shed.headers["retry-after"] == "1"
        shed = gateway.client.post("/v1/route/explain", json=chat_body())
        assert status_and_code(shed) == (503, "gateway_overloaded")
        worker.resume.set()
        received += b"".join(chunks)
    assert received.endswith(DONE)
    wait_until(lambda: gateway.status()["gateway"]["requests_in_flight"] == 0)
    assert gateway.client.post("/v1/route/explain", json=chat_body()).status_code == 200
    assert gateway.status()["gateway"]["requests_in_flight"] == 0
    assert gateway.chat().status_code == 200


def test_a_request_ends_and_counts_though_what_it_keeps_cannot_be_closed(
    make_gateway: MakeGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one fault of ours would take a place of the gateway for good."""

    async def close(_: ResponseExchange) -> None:
        raise RuntimeError

    monkeypatch.setattr(ResponseExchange, "close", close)
    gateway = make_gateway(worker, requests_limit=1)
    for number in (1, 2):
        body = {"model": "default", "input": "Hi", "store": False}
        with contextlib.suppress(httpx.ReadError):  # the fault also breaks the connection
            httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=60)
        wait_until(lambda: gateway.requests_in_flight() == 0)
        assert gateway.status()["outcomes"]["completed"] == number
    assert gateway.metric("memory_held_bytes") == 0


def test_c7_a_full_gateway_makes_room_for_the_client_with_the_fewest_requests(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    gateway = make_gateway(worker, requests_limit=3)

    def in_flight(number: int) -> bool:
        line = f"paceline_requests_in_flight {number}.0"
        return line in gateway.client.get("/metrics").text

    one, other = (gateway.create_key()["secret"] for _ in range(2))
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(raw_client(gateway)) for _ in range(3)]
        for number, client in enumerate(flood, 1):
            client.send(request_bytes(b"{ " * 4, secret=one)[:-7])
            wait_until(functools.partial(in_flight, number))
        gateway.use_key(one)
        assert status_and_code(gateway.client.post(CHAT, json={})) == (503, "gateway_overloaded")
        gateway.use_key(other)
        assert gateway.chat().status_code == 200
        assert b"gateway_overloaded" in flood[-1].read_until(b"gateway_overloaded")


def test_f38_repeated_lag_is_an_overload_and_one_long_pause_is_not() -> None:
    clock = FakeClock()
    lag = LoopLag(clock)
    assert lag.measure() == 0.0
    assert lag.measure() == 0.0, "this one is early"
    clock.advance(LOOP_CHECK_S + 2)
    assert lag.measure() == 2.0
    assert not lag.too_late
    for late_s, too_late in ((0.3, False), (0.3, False), (0.3, True), (0.0, False)):
        clock.advance(LOOP_CHECK_S + late_s)
        lag.measure()
        assert lag.too_late == too_late
    assert lag.worst_s == 2.0
    for _ in range(40):
        lag.measure()
    assert lag.worst_s == 0.0


def test_f38_after_a_blocked_event_loop_workers_stay_ready_and_status_and_metrics_show_its_lag(
    make_gateway: MakeGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "LOOP_CHECK_S", 0.01)
    gateway = make_gateway(worker)

    def block() -> None:
        """Block for longer than the heartbeat timeout of a worker, by the gateway's clock."""
        gateway.clock.advance(8)
        time.sleep(0.02)  # the next measurement is due

    gateway.loop.call_soon_threadsafe(block)
    response = gateway.chat()
    assert response.status_code == 200, response.text
    assert gateway.status()["workers"]["fake-a"]["state"] == "ready"
    assert gateway.metric("event_loop_lag_seconds") >= 7


def test_c7_rejections_of_a_client_are_delayed_beyond_a_hundred_and_a_hundred_a_second() -> None:
    clock = FakeClock()
    pacer = RejectionPacer(clock)
    assert [pacer.delay_s("a") for _ in range(100)] == [0.0] * 100
    assert pacer.delay_s("a") == pytest.approx(0.01)
    assert pacer.delay_s("b") == 0.0
    clock.advance(0.5)
    assert [pacer.delay_s("a") for _ in range(49)] == [0.0] * 49
    assert max(pacer.delay_s("a") for _ in range(1000)) == 1.0
    clock.advance(2.0)
    assert pacer.delay_s("a") == 0.0


def test_c7_a_client_that_repeats_rejected_requests_is_slowed(
    gateway_with_worker: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "_REJECTIONS_BURST", 1.0)
    monkeypatch.setattr(overload, "_REJECTIONS_PER_S", 1e-3)
    monkeypatch.setattr(overload, "_LONGEST_DELAY_S", 0.3)
    gateway_with_worker.use_key(gateway_with_worker.create_key(requests_a_minute=1)["secret"])
    assert gateway_with_worker.chat().status_code == 200
    for least_s in (0.0, 0.3):
        began_s = time.monotonic()
        rejected = gateway_with_worker.chat()
        assert status_and_code(rejected) == (429, "requests_a_minute_exceeded")
        assert time.monotonic() - began_s >= least_s


def test_c7_a_gateway_at_half_of_its_limit_of_requests_delays_no_rejection(
    make_gateway: MakeGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "_REJECTIONS_BURST", 0.0)
    monkeypatch.setattr(overload, "_REJECTIONS_PER_S", 1e-3)
    monkeypatch.setattr(overload, "_LONGEST_DELAY_S", 3600.0)  # longer than the client waits
    gateway = make_gateway(worker, requests_limit=1)
    gateway.use_key(gateway.create_key(requests_a_minute=1)["secret"])
    assert [gateway.chat().status_code for _ in range(2)] == [200, 429]


def test_c7_the_number_of_clients_with_counted_rejections_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(overload, "_REJECTED_CLIENTS", 2)
    pacer = RejectionPacer(FakeClock())
    assert [pacer.delay_s("a") for _ in range(101)][-1] > 0
    pacer.delay_s("b")
    assert pacer.delay_s("a") > 0
    for client in ("c", "d"):
        pacer.delay_s(client)
    assert pacer.delay_s("a") == 0.0
