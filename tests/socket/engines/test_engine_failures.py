"""Engines that are busy, fail or refuse: what clients see, and what becomes of the engine."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.gateway_fixtures import MakeGateway
from tests.support.running_gateway import RunningGateway, status_and_code
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, event
from tests.support.static_workers import static_worker

BUSY = Script(status=503, body=b'{"error": "Loading model"}', headers=((b"retry-after", b"1"),))


@pytest.fixture
def gateway_of(make_gateway: MakeGateway) -> Callable[..., RunningGateway]:
    """Return a function that starts a gateway of these engines, each an OpenAI server."""

    def start(*workers: ScriptedWorker, slots: int = 4) -> RunningGateway:
        entries = tuple(
            static_worker(id=one.worker_id, url=one.url, pools=["vlm"], slots=slots)
            for one in workers
        )
        return make_gateway(workers=entries)

    return start


GatewayOf = Callable[..., RunningGateway]


def test_a_busy_engine_is_waited_for(gateway_of: GatewayOf, worker: ScriptedWorker) -> None:
    worker.script = Script(rotation=(BUSY, Script(), Script()))
    gateway = gateway_of(worker)
    with ThreadPoolExecutor(3) as executor:
        responses = list(executor.map(lambda _: gateway.chat(), range(3)))
    assert {response.status_code for response in responses} == {200}
    assert len(worker.requests) >= 4, "one of them was told to come again"


def test_a_refusal_in_the_first_event_of_a_stream_is_the_clients(gateway_of, worker) -> None:
    message = "prompt is too long for /Users/ann/demo"
    worker.script = Script(events=(event({"error": {"message": message}}),))
    gateway = gateway_of(worker)
    for _ in range(6):
        refused = gateway.chat(stream=True)
        assert status_and_code(refused) == (400, "context_length_exceeded")
        assert "Users" not in refused.text
    assert gateway.status()["workers"]["fake-a"]["state"] == "ready"


def test_an_error_after_the_first_event_ends_the_stream(gateway_of, worker) -> None:
    begun = event({"choices": [{"index": 0, "delta": {"content": "one"}, "finish_reason": None}]})
    worker.script = Script(events=(begun, event({"error": "out of memory at 0x7"}), DONE))
    text = gateway_of(worker).chat(stream=True).text
    assert '"worker_failed"' in text
    assert "[DONE]" not in text
    assert "0x7" not in text


def test_what_an_engine_does_not_tell_is_unknown_in_the_usage_of_a_key(gateway_of, worker) -> None:
    silent = b'{"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}'
    worker.script = Script(body=silent)
    gateway = gateway_of(worker)
    gateway.use_key(gateway.create_key(name="ann")["secret"])
    assert gateway.chat().status_code == 200
    lane = gateway.status()["workers"]["fake-a"]["lanes"]["vlm"]
    assert lane["requests"] == 1
    assert lane["unreported"] == {"usage": 1, "cached_tokens": 1, "drafts": 1}
    (row,) = gateway.admin.get("/admin/v1/usage").json()["rows"]
    assert (row["requests"], row["cached_unknown_requests"]) == (1, 1)
    assert row["guessed_tokens"] > 0


def test_of_two_engines_one_that_answers_nine_of_ten_with_500_is_seen_by_no_client(
    gateway_of: GatewayOf, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    broken = Script(status=500, body=b'{"error": "Failed at /Users/ann"}')
    worker.script = Script(rotation=(*[broken] * 9, Script()))
    gateway = gateway_of(worker, second_worker, slots=16)
    with ThreadPoolExecutor(16) as executor:
        responses = list(executor.map(lambda n: gateway.chat(stream=bool(n % 2)), range(100)))
    assert {response.status_code for response in responses} == {200}
    assert not [one for one in responses if b"error" in one.content]
    assert any(not one.generated for one in worker.requests), "the broken engine was asked"
