"""What a client gets when all is well: whole answers, streams, headers, lists."""

from __future__ import annotations

import json

import openai
import pytest

from tests.support.images import data_url, png_header
from tests.support.running_gateway import RunningGateway, chat_body
from tests.support.scripted_worker import (
    DONE,
    JOIN_TOKEN,
    METRICS,
    ScriptedWorker,
    chunk,
    stream_events,
    usage_chunk,
)


def test_a_sampled_question_goes_to_vlm_and_says_why(gateway_with_worker: RunningGateway) -> None:
    response = gateway_with_worker.chat()
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "one two three"
    assert {
        name: response.headers[f"x-paceline-{name}"] for name in ("pool", "worker", "reason")
    } == {
        "pool": "vlm",
        "worker": "fake-a",
        "reason": "non_greedy_sampling",
    }
    assert response.headers["x-paceline-prefix"] == "none"
    assert response.headers["x-paceline-attempts"] == "1"
    assert response.headers["x-request-id"].startswith("req-")


def test_a_greedy_text_question_speculates(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    response = gateway_with_worker.chat(temperature=0)
    assert response.headers["x-paceline-pool"] == "text-mtp"
    assert response.headers["x-paceline-reason"] == "eligible"
    assert response.json()["metrics"] == METRICS
    assert worker.requests[0].headers["x-paceline-lane"] == "text-mtp"


def test_a_picture_goes_to_the_lane_that_sees(gateway_with_worker: RunningGateway) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(png_header(8, 8))}}
    messages = [{"role": "user", "content": [picture]}]
    response = gateway_with_worker.chat(temperature=0, messages=messages)
    assert response.headers["x-paceline-pool"] == "vlm"
    assert response.headers["x-paceline-reason"] == "media"


def test_the_worker_gets_effective_values_and_nothing_of_the_clients_headers(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    body = chat_body(model="gpt-4o-mini", top_k=None, seed=5, stream=True)
    headers = {"authorization": "Bearer secret-of-client", "cookie": "a=b", "x-request-id": "mine"}
    gateway_with_worker.client.post("/v1/chat/completions", json=body, headers=headers)
    heard = worker.requests[0]
    assert heard.body == {
        "model": "demo",
        "messages": body["messages"],
        "seed": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }
    assert heard.headers["authorization"] == f"Bearer {JOIN_TOKEN}"
    assert heard.headers["x-request-id"] == "mine"
    assert "cookie" not in heard.headers


def test_a_stream_passes_byte_for_byte_without_the_usage_nobody_asked_for(
    gateway_with_worker: RunningGateway,
) -> None:
    with gateway_with_worker.stream() as response:
        received = response.read()
    expected = stream_events(("one", " two", " three"))
    assert received == b"".join(piece for piece in expected if piece != usage_chunk())
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-paceline-pool"] == "vlm"


def test_a_stream_shows_usage_and_metrics_to_who_asks(gateway_with_worker: RunningGateway) -> None:
    with gateway_with_worker.stream(stream_options={"include_usage": True}) as response:
        received = response.read()
    assert received == b"".join(stream_events(("one", " two", " three")))


def test_the_first_event_arrives_before_the_last_is_made(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with gateway_with_worker.stream() as response:
        pieces = response.iter_raw()
        received = next(pieces)
        while chunk({"content": "one"}) not in received:
            received += next(pieces)
        assert DONE not in received
        worker.resume.set()
        assert b"".join(pieces).endswith(DONE)


def test_a_large_picture_arrives_whole(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    picture = {"url": data_url(png_header(8, 8) + b"ABC" * 1_000_000)}
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": picture}]}]
    assert gateway_with_worker.chat(messages=messages).status_code == 200
    assert worker.requests[0].body["messages"] == messages


def test_completions_are_relayed_too(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    response = gateway_with_worker.client.post(
        "/v1/completions", json={"model": "demo", "prompt": "Say"}
    )
    assert response.status_code == 200
    assert worker.requests[0].path == "/v1/completions"
    assert worker.requests[0].body["prompt"] == "Say"


def test_models_lists_what_is_served_and_its_other_names(
    gateway_with_worker: RunningGateway,
) -> None:
    names = {entry["id"] for entry in gateway_with_worker.client.get("/v1/models").json()["data"]}
    assert names == {"demo", "default", "gpt-4o-mini"}
    assert gateway_with_worker.client.get("/v1/models/default").json()["root"] == "demo"
    assert gateway_with_worker.client.get("/v1/models/other").status_code == 404


def test_default_means_the_only_model_of_the_fleet(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.model = "Qwen/Qwen3.5-4B"
    gateway.send_heartbeat(worker)
    assert gateway.chat(model="default").status_code == 200
    assert worker.requests[0].body["model"] == "Qwen/Qwen3.5-4B"
    names = {entry["id"] for entry in gateway.client.get("/v1/models").json()["data"]}
    assert names == {"Qwen/Qwen3.5-4B", "default"}


def test_the_explanation_names_the_lane_and_runs_nothing(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    told = gateway_with_worker.client.post(
        "/v1/route/explain", json=chat_body(temperature=0, n=2)
    ).json()
    assert told["bypass"] == ["multiple_choices"]
    assert told["route"] == "everything-else"
    assert (told["pool"], told["worker"], told["reason"]) == ("vlm", "fake-a", "multiple_choices")
    assert told["candidates"][0]["load"] == 0.0
    assert told["profile"]["sampling"]["temperature"] == 0.0
    assert not worker.requests


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_unmodified_openai_client_reads_answers_and_streams(
    gateway_with_worker: RunningGateway, temperature: float
) -> None:
    with openai.OpenAI(
        base_url=f"{gateway_with_worker.url}/v1", api_key="unused", max_retries=0
    ) as client:
        whole = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Hi"}],
            temperature=temperature,
        )
        assert whole.choices[0].message.content == "one two three"
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Hi"}],
            temperature=temperature,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "one two three"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10


def test_the_access_headers_open_nothing_to_foreign_pages(
    gateway_with_worker: RunningGateway,
) -> None:
    response = gateway_with_worker.client.options(
        "/v1/chat/completions",
        headers={"origin": "http://evil.example", "access-control-request-method": "POST"},
    )
    assert response.status_code == 405
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_error_text_is_json_in_openais_shape(gateway_with_worker: RunningGateway) -> None:
    response = gateway_with_worker.client.post("/v1/chat/completions", content=b"{")
    assert json.loads(response.content)["error"].keys() == {"message", "type", "param", "code"}


def test_a_whole_answer_without_an_end_does_not_fill_the_memory(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    whole = b'{"choices": [{"message": {"content": "one"}}]}'
    worker.script.body = whole + b" " * 64 * 1024 * 1024
    response = gateway_with_worker.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_failed")
    worker.script.body = whole
    assert gateway_with_worker.chat().status_code == 200
