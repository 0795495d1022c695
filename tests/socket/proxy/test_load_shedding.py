"""Load shedding: requests that an overloaded gateway rejects."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

import httpx
import pytest

from gateway.assembly import LOOP_CHECK_S
from gateway.errors import Overloaded
from gateway.proxy import load_shedding as overload
from gateway.proxy.load_shedding import Load, LoopLag, RejectionPacer
from tests.support.fake_clock import FakeClock
from tests.support.raw_client import raw_client
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    chat_body,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, ScriptedWorker


def test_f27_a_request_over_the_limit_is_shed_and_running_requests_complete(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with RunningGateway(make_settings(tmp_path, requests_limit=1)) as gateway:
        gateway.send_heartbeat(worker)
        with gateway.stream() as running:
            chunks = running.iter_raw()
            received = next(chunks)
            shed = httpx.post(f"{gateway.url}/v1/chat/completions", json={}, timeout=60)
            assert (shed.status_code, shed.headers["retry-after"]) == (503, "1")
            assert shed.json()["error"]["code"] == "gateway_overloaded"
            worker.resume.set()
            received += b"".join(chunks)
        assert received.endswith(DONE)
        wait_until(lambda: gateway.status()["gateway"]["requests_in_flight"] == 0)
        assert gateway.chat().status_code == 200


def test_c16_an_explanation_is_shed_as_a_request(tmp_path: Path, worker: ScriptedWorker) -> None:
    worker.script.hang_after = 2
    with RunningGateway(make_settings(tmp_path, requests_limit=1)) as gateway:
        gateway.send_heartbeat(worker)
        with gateway.stream() as running:
            chunks = running.iter_raw()
            next(chunks)
            shed = gateway.client.post("/v1/route/explain", json=chat_body())
            assert status_and_code(shed) == (503, "gateway_overloaded")
        wait_until(lambda: gateway.status()["gateway"]["requests_in_flight"] == 0)
        assert gateway.client.post("/v1/route/explain", json=chat_body()).status_code == 200
        assert gateway.status()["gateway"]["requests_in_flight"] == 0


def test_c7_a_full_gateway_makes_room_for_the_client_with_the_fewest_requests(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    with RunningGateway(make_settings(tmp_path, requests_limit=3)) as gateway:
        gateway.send_heartbeat(worker)

        def in_flight(number: int) -> bool:
            line = f"paceline_requests_in_flight {number}.0"
            return line in gateway.client.get("/metrics").text

        one, other = gateway.create_key(), gateway.create_key()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
        authorization = bearer_headers(one)["authorization"]
        with contextlib.ExitStack() as stack:
            flood = [stack.enter_context(raw_client(gateway)) for _ in range(3)]
            for number, client in enumerate(flood, 1):
                client.send(f"{head}authorization: {authorization}\r\n\r\n{{".encode())
                wait_until(functools.partial(in_flight, number))
            shed = httpx.post(
                f"{gateway.url}/v1/chat/completions",
                json={},
                headers=bearer_headers(one),
                timeout=60,
            )
            assert status_and_code(shed) == (503, "gateway_overloaded")
            gateway.use_key(other["secret"])
            assert gateway.chat().status_code == 200
            assert b"gateway_overloaded" in flood[-1].read_until(b"gateway_overloaded")


def test_f38_status_and_metrics_show_the_event_loop_lag(
    gateway_with_worker: RunningGateway,
) -> None:
    assert gateway_with_worker.status()["gateway"]["event_loop_lag_s"] >= 0
    assert "paceline_event_loop_lag_seconds " in gateway_with_worker.client.get("/metrics").text


def test_f38_repeated_lag_is_an_overload_and_one_long_pause_is_not() -> None:
    lag = LoopLag(FakeClock())
    lag.note(5.0)
    assert not lag.too_late
    for _ in range(3):
        lag.note(0.3)
    assert lag.too_late
    lag.note(0.0)
    assert not lag.too_late
    assert lag.worst_s == 5.0
    for _ in range(40):
        lag.note(-0.001)
    assert lag.worst_s == 0.0


def test_f38_the_first_measurement_of_the_lag_is_zero_and_later_ones_are_delays() -> None:
    clock = FakeClock()
    lag = LoopLag(clock)
    assert lag.measure() == 0.0
    assert lag.measure() == 0.0, "this one is early"
    clock.advance(LOOP_CHECK_S + 2)
    assert lag.measure() == 2.0


def test_f26_the_bodies_of_all_requests_may_take_512_mib() -> None:
    load = overload.Load(1, FakeClock())
    load.hold(512 * 1024**2)
    with pytest.raises(Overloaded):
        load.hold(1)


def test_f26_buffered_bodies_are_limited_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "BODIES_LIMIT_BYTES", 100)
    load = Load(1, FakeClock())
    load.hold(100)
    with pytest.raises(Overloaded):
        load.hold(1)
    load.end(101)
    load.hold(100)


def test_f38_after_a_blocked_event_loop_workers_stay_ready(
    gateway_with_worker: RunningGateway,
) -> None:
    def block() -> None:
        """Block for longer than the heartbeat timeout of a worker, by the gateway's clock."""
        gateway_with_worker.clock.advance(8)
        time.sleep(2 * LOOP_CHECK_S)  # so that the next measurement is due

    gateway_with_worker.loop.call_soon_threadsafe(block)
    response = gateway_with_worker.chat()
    assert response.status_code == 200, response.text
    assert gateway_with_worker.status()["workers"]["fake-a"]["state"] == "ready"


def test_c7_rejections_of_a_client_are_delayed_beyond_a_hundred_and_a_hundred_a_second() -> None:
    now_s = 1_000_000.0
    pacer = RejectionPacer(lambda: now_s)
    assert [pacer.delay_s("a") for _ in range(100)] == [0.0] * 100
    assert pacer.delay_s("a") == pytest.approx(0.01)
    assert pacer.delay_s("b") == 0.0
    now_s += 0.5
    assert [pacer.delay_s("a") for _ in range(49)] == [0.0] * 49
    assert max(pacer.delay_s("a") for _ in range(1000)) == 1.0
    now_s += 2.0
    assert pacer.delay_s("a") == 0.0


def test_c7_a_client_that_repeats_rejected_requests_is_slowed(
    tmp_path: Path, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "_REJECTIONS_BURST", 1.0)
    monkeypatch.setattr(overload, "_REJECTIONS_PER_S", 1e-3)
    monkeypatch.setattr(overload, "_LONGEST_DELAY_S", 0.3)
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        gateway.use_key(gateway.create_key(requests_a_minute=1)["secret"])
        assert gateway.chat().status_code == 200
        for least_s in (0.0, 0.3):
            began_s = time.monotonic()
            rejected = gateway.chat()
            assert status_and_code(rejected) == (429, "requests_a_minute_exceeded")
            assert time.monotonic() - began_s >= least_s


def test_c7_a_gateway_at_half_of_its_limit_of_requests_delays_no_rejection(
    tmp_path: Path, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "_REJECTIONS_BURST", 0.0)
    monkeypatch.setattr(overload, "_REJECTIONS_PER_S", 1e-3)
    monkeypatch.setattr(overload, "_LONGEST_DELAY_S", 3600.0)  # longer than the client waits
    with RunningGateway(make_settings(tmp_path, requests_limit=1)) as gateway:
        gateway.send_heartbeat(worker)
        gateway.use_key(gateway.create_key(requests_a_minute=1)["secret"])
        assert gateway.chat().status_code == 200
        assert gateway.chat().status_code == 429


def test_c7_the_number_of_clients_with_counted_rejections_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overload, "_REJECTED_CLIENTS", 2)
    pacer = RejectionPacer(lambda: 1_000_000.0)
    assert [pacer.delay_s("a") for _ in range(101)][-1] > 0
    pacer.delay_s("b")
    assert pacer.delay_s("a") > 0
    for client in ("c", "d"):
        pacer.delay_s(client)
    assert pacer.delay_s("a") == 0.0
