"""An engine that keeps refusing gets few requests, and clients are told how long it pauses."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.static_workers import StaticWorker
from gateway.fleet import scheduler
from gateway.fleet.circuit_breaker import HEALTHY
from tests.support.policies import single_pool_policy, to_yaml
from tests.support.running_gateway import RunningGateway, make_settings, said, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker


def gateway_of(folder: Path, *workers: ScriptedWorker, queue_s: float) -> RunningGateway:
    """Return a gateway of these engines, where a request waits for so long."""
    policy = folder / "policy.yaml"
    policy.write_text(to_yaml(single_pool_policy(timeout_s=queue_s)))
    entries = tuple(
        StaticWorker(id=one.worker_id, kind="openai", url=one.url, models=("demo",), slots=4)
        for one in workers
    )
    return RunningGateway(make_settings(folder, workers=entries, policy=policy))


def refusing(status: int) -> Script:
    """Return a script that refuses without a Retry-After."""
    return Script(status=status, body=b'{"error": "busy"}')


@pytest.mark.parametrize("status", [429, 503])
def test_f83_an_engine_that_keeps_refusing_is_asked_ever_more_rarely(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker, status: int
) -> None:
    workers = (worker, second_worker)
    for one in workers:
        one.script = refusing(status)
    with gateway_of(tmp_path, *workers, queue_s=4.5) as gateway:
        wait_until(lambda: len(gateway.status()["pools"]["vlm"]["workers"]) == 2)
        busy = gateway.chat()
    assert (busy.status_code, busy.json()["error"]["code"]) == (503, "workers_busy")
    assert all(len(one.requests) <= 3 for one in workers), "at 0, 1 and 3 seconds"
    assert int(busy.headers["retry-after"]) >= 2, "the engines pause for longer than that"


@pytest.mark.parametrize("leaves", [False, True])
def test_f83_one_request_probes_for_all_who_wait(tmp_path, worker, leaves) -> None:
    """Until it has an answer, no other body is sent; if its client leaves, another one probes."""
    clients = 8
    worker.script = Script(rotation=(refusing(429), Script(hang=True), *[Script()] * clients))
    with gateway_of(tmp_path, worker, queue_s=60.0) as gateway:
        wait_until(lambda: len(gateway.status()["pools"]["vlm"]["workers"]) == 1)
        with (
            ThreadPoolExecutor(clients) as executor,
            socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as leaving,
        ):
            leaving.sendall(LEAVING)
            wait_until(lambda: len(worker.requests) == 2)
            answers = [executor.submit(gateway.chat) for _ in range(clients)]
            wait_until(lambda: gateway.status()["pools"]["vlm"]["waiting"] == clients)
            assert worker.in_flight == 1, "the engine has four slots"
            if leaves:
                leaving.close()
            else:
                worker.resume.set()
            assert {one.result().status_code for one in answers} == {200}
    assert len(worker.requests) == 2 + clients


def test_f83_a_busy_engine_that_takes_long_for_one_answer_gets_others_meanwhile(
    tmp_path: Path, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole answer has its head at its end, and an engine that is busy says so at once."""
    monkeypatch.setattr(scheduler, "PROBE_S", 0.0)
    worker.script = refusing(429)
    with gateway_of(tmp_path, worker, queue_s=60.0) as gateway, ThreadPoolExecutor(1) as executor:
        wait_until(lambda: len(gateway.status()["pools"]["vlm"]["workers"]) == 1)
        worker.scripts_by_message["Tell all."] = refusing(429)
        long = executor.submit(gateway.chat, **said("Tell all."))
        wait_until(lambda: len(worker.requests) == 1 and worker.in_flight == 0)
        worker.scripts_by_message["Tell all."] = Script(hang=True)
        worker.script = Script()
        wait_until(lambda: worker.in_flight == 1)
        assert gateway.chat().status_code == 200
        assert not long.done(), "the long answer goes on"
        worker.resume.set()
        assert long.result().status_code == 200


BODY = b'{"model": "demo", "messages": [{"role": "user", "content": "Say a word."}]}'
LEAVING = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


@given(refusals=st.lists(st.tuples(st.floats(1, 60), st.floats(0, 0.999)), min_size=1, max_size=12))
def test_f83_pauses_double_up_to_a_bound_and_begin_anew_once_a_request_is_taken(refusals) -> None:
    breaker, now_s = HEALTHY, 1_000_000.0
    for number, (retry_after_s, jitter) in enumerate(refusals):
        breaker = breaker.record_busy(now_s, retry_after_s, jitter=jitter)
        pause_s = breaker.busy_until_s - now_s
        doubled_s = 0.0 if number == 0 else min(60.0, 2.0**number)
        least_s = max(retry_after_s, doubled_s)
        assert least_s - 1e-6 <= pause_s <= max(retry_after_s, doubled_s * 1.2) + 1e-6
        again = breaker.record_busy(now_s + pause_s / 2, 0.1, jitter=jitter)
        assert again.busy_until_s == breaker.busy_until_s, "sent before the pause"
        now_s = breaker.busy_until_s
    taken = breaker.record_taken().record_busy(now_s, 1.0, jitter=0.5)
    assert taken.busy_until_s == now_s + 1.0
