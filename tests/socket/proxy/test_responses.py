"""Successful responses: bodies, streams, headers and lists of models."""

import contextlib
import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gateway.http import upstream
from gateway.proxy import forward
from gateway.proxy.context import RequestContext
from tests.support.gateway_fixtures import Served
from tests.support.images import data_url, png_header
from tests.support.running_gateway import RunningGateway, chat_body, status_and_code, wait_until
from tests.support.scripted_worker import (
    DONE,
    JOIN_TOKEN,
    METRICS,
    Script,
    ScriptedWorker,
    chunk,
    stream_events,
    usage_chunk,
)
from tests.support.threads import record_threads


def test_a_sampled_request_runs_on_vlm_with_its_reason(shared_gateway: RunningGateway) -> None:
    response = shared_gateway.chat()
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "one two three"
    told = {name.removeprefix("x-paceline-"): value for name, value in response.headers.items()}
    expected = {"pool": "vlm", "worker": "fake-a", "reason": "non_greedy_sampling"}
    assert expected.items() <= told.items()
    assert (told["prefix"], told["attempts"]) == ("none", "1")
    assert response.headers["x-request-id"].startswith("req-")


def test_a_greedy_text_request_runs_on_the_mtp_lane_and_one_with_an_image_on_vlm(shared) -> None:
    response = shared.gateway.chat(temperature=0)
    assert response.headers["x-paceline-pool"] == "text-mtp"
    assert response.headers["x-paceline-reason"] == "eligible"
    assert response.json()["metrics"] == METRICS
    assert shared.worker.requests[0].headers["x-paceline-lane"] == "text-mtp"
    image = {"url": data_url(png_header(8, 8) + b"ABC" * 1_000_000)}
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]
    response = shared.gateway.chat(temperature=0, messages=messages)
    assert response.headers["x-paceline-pool"] == "vlm"
    assert response.headers["x-paceline-reason"] == "media"
    assert shared.worker.requests[1].body["messages"] == messages, "unchanged, though it is large"


def test_the_worker_gets_effective_values_and_no_client_headers(shared: Served) -> None:
    body = chat_body(model="gpt-4o-mini", top_k=None, seed=5, stream=True)
    headers = {
        "authorization": "Bearer secret-of-client",
        "cookie": "a=b",
        "x-request-id": "client-id",
    }
    shared.gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    received = shared.worker.requests[0]
    assert received.body == {
        "model": "demo",
        "messages": body["messages"],
        "seed": 5,
        "stream": True,
        "stream_options": {
            "include_usage": True,
            "continuous_usage_stats": True,
            "usage_interval_tokens": 32,
        },
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }
    assert received.headers["authorization"] == f"Bearer {JOIN_TOKEN}"
    assert received.headers["x-request-id"] == "client-id"
    assert "cookie" not in received.headers


def test_a_stream_is_relayed_byte_for_byte_without_unrequested_usage(shared_gateway) -> None:
    events = stream_events(("one", " two", " three"))
    response = shared_gateway.chat(stream=True)
    assert response.content == b"".join(event for event in events if event != usage_chunk())
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-paceline-pool"] == "vlm"
    response = shared_gateway.chat(stream=True, stream_options={"include_usage": True})
    assert response.content == b"".join(events)


def test_the_first_event_arrives_before_the_last_is_generated(shared: Served) -> None:
    shared.worker.script.hang_after = 2
    with shared.gateway.stream() as response:
        chunks = response.iter_raw()
        received = next(chunks)
        while chunk({"content": "one"}) not in received:
            received += next(chunks)
        assert DONE not in received
        shared.worker.resume.set()
        assert b"".join(chunks).endswith(DONE)


def test_models_lists_served_models_and_their_aliases(shared_gateway: RunningGateway) -> None:
    names = {entry["id"] for entry in shared_gateway.client.get("/v1/models").json()["data"]}
    assert names == {"demo", "default", "gpt-4o-mini"}
    assert shared_gateway.client.get("/v1/models/default").json()["root"] == "demo"
    assert shared_gateway.client.get("/v1/models/other").status_code == 404


def test_a_models_own_sampling_values_apply_where_neither_policy_nor_request_has_any(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    """They are part of the report, of `/v1/models` and of what the worker gets."""
    worker.model = "qwen"
    own = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    gateway.join(worker, sampling=own)
    assert gateway.chat(model="qwen", top_k=5).status_code == 200
    body = worker.requests[0].body
    sent = {"temperature": 0.6, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.1}
    assert sent.items() <= body.items()
    shown = gateway.client.get("/v1/models/qwen").json()
    assert shown["sampling"] == {**sent, "top_k": 20}
    assert shown["max_model_len"] == 4096


def test_explain_returns_the_decision_without_running_the_request(shared: Served) -> None:
    explanation = shared.gateway.client.post(
        "/v1/route/explain", json=chat_body(temperature=0, n=2)
    ).json()
    assert explanation["bypass"] == ["multiple_choices"]
    expected = {"route": "everything-else", "pool": "vlm", "worker": "fake-a"}
    assert {**expected, "reason": "multiple_choices"}.items() <= explanation.items()
    assert explanation["candidates"][0]["load"] == 0.0
    assert explanation["profile"]["sampling"]["temperature"] == 0.0
    assert not shared.worker.requests


def test_an_oversized_response_becomes_a_502(served, monkeypatch) -> None:
    assert forward._WHOLE_LIMIT_BYTES == 64 * 1024 * 1024
    monkeypatch.setattr(forward, "_WHOLE_LIMIT_BYTES", 64 * 1024)
    body = b'{"choices": [{"message": {"content": "one"}}]}'
    served.worker.script.body = body + b" " * 64 * 1024
    assert status_and_code(served.gateway.chat()) == (502, "response_too_large")
    served.worker.script.body = body
    assert served.gateway.chat().status_code == 200


def test_a_large_answer_is_read_and_written_beside_the_event_loop(served, monkeypatch) -> None:
    """Vectors may take 64 MB: to parse them at once would hold up all requests."""
    steps = ("footprint_bytes", "parse_answer", "encode_body")
    threads = record_threads(monkeypatch, *((forward, name) for name in steps))
    logprobs = {"content": [{"token": "\u20ac", "logprob": -0.5}] * 120_000}
    choice = {"index": 0, "message": {"role": "assistant", "content": "one"}, "logprobs": logprobs}
    answer = {"choices": [{**choice, "finish_reason": "stop"}], "model": "of-the-engine"}
    served.worker.script.body = json.dumps(answer).encode()
    read = served.gateway.chat().json()
    assert threads == {"inspection_0"}
    assert read["choices"][0]["logprobs"] == logprobs
    assert read["model"] != "of-the-engine"


def test_f58_requests_with_one_idempotency_key_are_not_deduplicated(served: Served) -> None:
    served.gateway.client.headers["idempotency-key"] = "the-same"
    with ThreadPoolExecutor(2) as executor:
        responses = [executor.submit(served.gateway.chat) for _ in range(2)]
    assert [response.result().status_code for response in responses] == [200, 200]
    assert len(served.worker.requests) == 2
    assert "idempotency-key" not in served.worker.requests[0].headers


@contextlib.contextmanager
def no_garbage_left() -> Iterator[None]:
    """Expect that no request of within this context is alive after it."""
    gc.collect()
    gc.disable()
    try:
        yield
        wait_until(lambda: not any(isinstance(one, RequestContext) for one in gc.get_objects()))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"max_tokens": 1}),
        ("messages", {"max_tokens": 1}),
        ("responses", {"input": "Hi"}),
        ("responses", {"input": "Hi", "previous_response_id": f"resp_{0:048}"}),
        ("responses", {"input": "Hi", "background": True}),
    ],
    ids=["chat", "messages", "responses", "an unknown one before", "background response"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_c16_the_memory_of_an_answered_request_waits_for_no_garbage_collector(
    shared: Served, path: str, fields: dict[str, Any], stream: bool
) -> None:
    body = chat_body(stream=stream, **fields)
    if "input" in fields:
        del body["messages"]

    with no_garbage_left():
        response = shared.gateway.client.post(f"/v1/{path}", json=body)
        assert response.status_code in (200, 400)


def test_c16_nor_does_that_of_a_request_whose_workers_have_failed(
    gateway: RunningGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream.log, "disabled", True)  # pytest keeps records and their errors
    worker.script = Script(drop=True)
    gateway.join(worker)
    with no_garbage_left():
        assert status_and_code(gateway.chat()) == (502, "worker_lost")
