"""Fields of the policy, each tested at the socket, and the metrics in responses."""

from __future__ import annotations

import base64
import json
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config.static_workers import pool_problems
from gateway.proxy import forward
from policies.document import read_policy
from policies.routes import DAYS
from policies.sections import MetricsRules
from tests.support.policies import DEFAULT_ROUTE, gateway_with_policy
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_worker import METRICS, USAGE, Script, ScriptedWorker
from tests.support.static_workers import static_worker


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def pool_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-paceline-pool"]


def image(width_px: int, height_px: int) -> dict[str, Any]:
    """Return an image part with the first bytes of a PNG; the gateway parses no others."""
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width_px, height_px)
    url = f"data:image/png;base64,{base64.b64encode(head + bytes(5)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def with_images(*images: dict[str, Any]) -> dict[str, Any]:
    content = [*images, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": content}]}


def messages_of(text: str, count: int = 1) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index in range(count)]
    return {"messages": messages}


TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("when", "fields"),
    [
        ({"media": True}, with_images(image(2, 2))),
        ({"media": "image"}, with_images(image(2, 2))),
        ({"mtp_eligible": True}, {"temperature": 0}),
        ({"greedy": True}, {"temperature": 0, "n": 2}),
        ({"stream": True}, {"stream": True}),
        ({"features": {"tools": True}}, {"tools": [TOOL]}),
        ({"features": {"structured_output": True}}, {"response_format": {"type": "json_object"}}),
        ({"features": {"logprobs": True}}, {"logprobs": True}),
        ({"features": {"multiple_choices": True}}, {"n": 2}),
        ({"features": {"logits_processors": True}}, {"presence_penalty": 1}),
        ({"features": {"thinking_budget": True}}, {"thinking_budget": 9}),
        ({"prompt_chars": {"at_least": 50}}, messages_of("x" * 50)),
        ({"prompt_chars": {"at_most": 3}}, messages_of("x")),
        ({"max_tokens": {"at_most": 9}}, {"max_tokens": 9}),
        ({"messages": {"at_least": 3}}, messages_of("x" * 20, 3)),
        ({"model": "other"}, {"model": "other"}),
    ],
)
def test_a_route_matches_requests_that_meet_its_conditions(
    tmp_path: Path, worker: ScriptedWorker, when: dict[str, Any], fields: dict[str, Any]
) -> None:
    routes = [{"name": "special", "when": when, "to": "special"}, DEFAULT_ROUTE]
    pools = {"special": {"lanes": "vlm"}, "vlm": {"lanes": "vlm"}}
    static_workers = (static_worker(url=worker.url, models=["demo", "other"], pools=["vlm"]),)
    with gateway_with_policy(
        tmp_path, static_workers=static_workers, routes=routes, pools=pools
    ) as gateway:
        response = gateway.chat(**fields)
        assert pool_of(response) == "special"
        assert pool_of(gateway.chat()) == "vlm"


def test_the_policy_makes_the_answers_of_a_model_exact_unless_a_request_says_otherwise(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    long = messages_of("x" * 400)
    with gateway_with_policy(tmp_path, worker, models={"demo": {"exact": True}}) as gateway:
        response = gateway.chat(temperature=0, **long)
        assert response.headers["x-paceline-reason"] == "exact"
        assert response.headers["x-paceline-prefix"] == "none"
        gateway.chat(temperature=0, exact=False, **long)
        assert [one.body.get("exact") for one in worker.requests] == [True, False]
        assert gateway.status()["decisions"]["bypass_counts"]["exact"] == 1
        status, param, message = error_of(gateway.chat(draft_tokens=2))
        assert (status, param) == (400, "draft_tokens")
        assert "exact" in message


def test_an_exact_answer_is_asked_of_no_engine_of_another_kind(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    static_workers = (static_worker(url=worker.url, models=["demo"], pools=["vlm"]),)
    with gateway_with_policy(tmp_path, static_workers=static_workers) as gateway:
        status, param, message = error_of(gateway.chat(exact=True))
        assert (status, param) == (400, "exact")
        assert "exact answers" in message
        assert gateway.chat(exact=False).status_code == 200
    assert [one.body.get("exact") for one in worker.requests] == [None]


def test_a_route_matches_requests_with_its_header(tmp_path: Path, worker: ScriptedWorker) -> None:
    routes = [
        {"name": "batch", "when": {"header": {"x-batch": ["yes", "please"]}}, "to": "batch"},
        DEFAULT_ROUTE,
    ]
    pools = {"batch": {"lanes": "vlm"}, "vlm": {"lanes": "vlm"}}
    with gateway_with_policy(tmp_path, worker, routes=routes, pools=pools) as gateway:

        def pool_for(**headers: str) -> str:
            gateway.client.headers = httpx.Headers(headers)
            return pool_of(gateway.chat())

        assert [pool_for(), pool_for(**{"X-Batch": "please"}), pool_for(**{"x-batch": "no"})] == [
            *("vlm", "batch", "vlm")
        ]


def test_l4_a_header_matches_in_utf_8_as_the_policy_is_written(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    routes = [
        {"name": "team", "when": {"header": {"x-team": "Zürich"}}, "to": "team"},
        DEFAULT_ROUTE,
    ]
    pools = {"team": {"lanes": "vlm"}, "vlm": {"lanes": "vlm"}}
    with gateway_with_policy(tmp_path, worker, routes=routes, pools=pools) as gateway:
        for encoding in ("utf-8", "latin-1"):
            gateway.client.headers = httpx.Headers([(b"x-team", "Zürich".encode(encoding))])
            assert pool_of(gateway.chat()) == "team"
        gateway.client.headers = httpx.Headers([(b"x-team", b"Z\xffrich")])
        assert pool_of(gateway.chat()) == "vlm"


def test_a_route_matches_requests_in_its_hours_and_days(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    now = time.localtime()
    around = f"{(now.tm_hour - 2) % 24:02}:00-{(now.tm_hour + 2) % 24:02}:59"
    before = f"{(now.tm_hour - 4) % 24:02}:00-{(now.tm_hour - 3) % 24:02}:59"
    today = [DAYS[now.tm_wday], DAYS[(now.tm_wday + 1) % 7]]  # the test may run over midnight
    routes = [
        {"name": "past", "when": {"hours": before}, "to": "past"},
        {"name": "another-day", "when": {"days": [*{*DAYS} - {*today}]}, "to": "past"},
        {"name": "now", "when": {"hours": around, "stream": True}, "to": "now"},
        {"name": "today", "when": {"days": today}, "to": "today"},
        DEFAULT_ROUTE,
    ]
    pools = {name: {"lanes": "vlm"} for name in ("past", "now", "today", "vlm")}
    with gateway_with_policy(tmp_path, worker, routes=routes, pools=pools) as gateway:
        assert pool_of(gateway.chat(stream=True)) == "now"
        assert pool_of(gateway.chat()) == "today"


def test_a_pool_contains_only_workers_with_its_labels(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    pools = {"vlm": {"lanes": "vlm", "workers": {"labels": ["fake-b"]}}}
    with gateway_with_policy(tmp_path, worker, second_worker, pools=pools) as gateway:
        responses = [gateway.chat() for _ in range(5)]
        assert {response.headers["x-paceline-worker"] for response in responses} == {"fake-b"}
        status = gateway.status()
        assert (status["pools"]["vlm"]["workers"], status["pools"]["vlm"]["slots"]) == (
            *(["fake-b"], 4),
        )
        assert status["workers"]["fake-b"]["labels"] == ["fake-b"]
        assert 'paceline_pool_slots{pool="vlm"} 4.0' in gateway.client.get("/metrics").text


def test_a_worker_with_more_weight_gets_more_requests(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    pools = {"vlm": {"lanes": "vlm", "weights": {"fake-a": 1000}}}
    with gateway_with_policy(tmp_path, worker, second_worker, pools=pools) as gateway:
        for _ in range(10):
            gateway.chat()
    assert (len(worker.requests), len(second_worker.requests)) in ((10, 0), (9, 1))


def test_a_pool_runs_no_more_requests_than_its_slots(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    pools = {"vlm": {"lanes": "vlm", "slots": 2}}
    worker.script = Script(hang=True)
    with (
        gateway_with_policy(tmp_path, worker, pools=pools) as gateway,
        ThreadPoolExecutor(3) as executor,
    ):
        responses = [executor.submit(gateway.chat) for _ in range(3)]
        wait_until(lambda: gateway.status()["pools"]["vlm"]["waiting"] == 1)
        assert worker.in_flight == 2
        assert gateway.status()["pools"]["vlm"]["slots"] == 2
        assert gateway.status()["pools"]["vlm"]["in_flight"] == 2
        worker.resume.set()
        assert {response.result().status_code for response in responses} == {200}


def test_max_tokens_of_the_policy_limits_requests(tmp_path: Path, worker: ScriptedWorker) -> None:
    with gateway_with_policy(tmp_path, worker, limits={"max_tokens": 99}) as gateway:
        assert error_of(gateway.chat(max_tokens=100)) == (
            *(400, "max_tokens", "'max_tokens' may be at most 99."),
        )
        assert error_of(gateway.chat(max_completion_tokens=100))[:2] == (400, "max_tokens")
        assert gateway.chat().status_code == 200
        assert gateway.chat(max_completion_tokens=7).status_code == 200
    assert [received.body.get("max_tokens") for received in worker.requests] == [99, None]


def test_prompt_chars_of_the_policy_limits_requests(tmp_path: Path, worker: ScriptedWorker) -> None:
    with gateway_with_policy(tmp_path, worker, limits={"prompt_chars": 20}) as gateway:
        assert gateway.chat(**messages_of("x" * 20)).status_code == 200
        status, param, message = error_of(gateway.chat(**messages_of("x" * 11, 2)))
        assert (status, param) == (400, "messages")
        assert "at most 20 characters" in message
        prompt = gateway.client.post("/v1/completions", json={"model": "demo", "prompt": "x" * 21})
        assert error_of(prompt)[:2] == (400, "prompt")


@pytest.mark.parametrize(
    ("media", "images", "expected"),
    [
        ({"kinds": []}, [image(2, 2)], "'image' content is not allowed, only: text."),
        ({"kinds": ["audio"]}, [image(2, 2)], "only: text, audio."),
        ({"pictures": 1}, [image(2, 2)] * 2, "at most 1 pictures"),
        ({"pixels": 99}, [image(10, 10)], "at most 99 pixels"),
    ],
)
def test_media_outside_the_policys_limits_are_rejected(
    tmp_path: Path, worker: ScriptedWorker, media: dict[str, Any], images: list[Any], expected: str
) -> None:
    with gateway_with_policy(tmp_path, worker, media=media) as gateway:
        status, param, message = error_of(gateway.chat(**with_images(*images)))
        assert (status, param) == (400, "messages")
        assert expected in message
        assert gateway.chat().status_code == 200
    assert len(worker.requests) == 1


def test_request_timeout_of_the_policy_limits_requests(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    worker.script = Script(hang=True)
    with gateway_with_policy(tmp_path, worker, limits={"request_timeout_s": 0.1}) as gateway:
        response = gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")


@pytest.mark.parametrize(
    ("script", "status"),
    [(Script(status=503, headers=((b"retry-after", b"1"),)), 503), (Script(status=500), 502)],
)
def test_a_policy_without_retries_denies_them(
    tmp_path: Path,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    script: Script,
    status: int,
) -> None:
    worker.script = script
    pools = {"vlm": {"lanes": "vlm", "weights": {"fake-a": 1000}}}
    no_retries = {"share": 0, "at_least": 0}
    with gateway_with_policy(
        tmp_path, worker, second_worker, pools=pools, retries=no_retries
    ) as gateway:
        response = gateway.chat()
        assert (response.status_code, response.headers["x-paceline-attempts"]) == (status, "1")
    assert second_worker.requests == []


@pytest.mark.parametrize(
    ("script", "margin_s"),
    [
        pytest.param(Script(hang=True), 0.05, id="which reads for longer than estimated"),
        pytest.param(Script(hang_after=1), 3600, id="which has begun to answer"),
    ],
)
def test_a_retry_at_a_worker_lets_the_next_one_begin(
    tmp_path: Path,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
    *,
    script: Script,
    margin_s: float,
) -> None:
    assert forward._READ_MARGIN_S == 1
    monkeypatch.setattr(forward, "_READ_MARGIN_S", margin_s)
    worker.script, second_worker.script = Script(status=500), script
    pools = {"vlm": {"lanes": "vlm", "weights": {"fake-a": 1000}}}
    retries = {"share": 0, "at_least": 1}
    with (
        gateway_with_policy(
            tmp_path, worker, second_worker, pools=pools, retries=retries
        ) as gateway,
        ThreadPoolExecutor(2) as executor,
    ):
        responses = [executor.submit(gateway.chat, stream=True) for _ in range(2)]
        wait_until(lambda: second_worker.in_flight == 2)
        second_worker.resume.set()
        assert {response.result().status_code for response in responses} == {200}


def test_a_static_worker_has_the_labels_of_its_entry(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    pools = {"vlm": {"lanes": "vlm", "workers": {"labels": "big"}}, "rest": {"lanes": "vlm"}}
    static_workers = (
        static_worker(id="small", url=worker.url, pools=["vlm"]),
        static_worker(id="large", url=second_worker.url, pools=["vlm"], labels=["big"]),
    )
    with gateway_with_policy(tmp_path, static_workers=static_workers, pools=pools) as gateway:
        assert gateway.status()["pools"]["rest"]["workers"] == ["large", "small"]
        responses = {gateway.chat().headers["x-paceline-worker"] for _ in range(5)}
        assert responses == {"large"}


def test_a_static_worker_outside_every_pool_is_a_problem_of_the_policy() -> None:
    policy = read_policy(
        {
            "version": 1,
            "routes": [{"name": "all", "to": "vision"}],
            "pools": {"vision": {"lanes": "vlm", "workers": {"labels": "big"}}},
        },
        "test",
    )
    assert pool_problems((static_worker(pools=["vision", "vlm"], labels=["big"]),), policy) == []
    (problem,) = pool_problems((static_worker(pools=["vlm"]),), policy)
    assert "the pool 'vlm', but the policy allows it only in: none" in problem


def test_an_explanation_shows_the_caller_that_the_policy_evaluated(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    routes = [{"name": "batch", "when": {"header": {"x-batch": "yes"}}, "to": "vlm"}, DEFAULT_ROUTE]
    with gateway_with_policy(tmp_path, worker, routes=routes) as gateway:
        body = {"model": "demo", **messages_of("Hi")}
        explanation = gateway.client.post(
            "/v1/route/explain", json=body, headers={"x-batch": "yes", "x-other": "z"}
        ).json()
        assert explanation["route"] == "batch"
        assert explanation["caller"]["headers"] == {"x-batch": "yes"}


WITH_METRICS = {"metrics": "summary"}
WITH_USAGE = {"stream_options": {"include_usage": True}}


def last_chunk(gateway: RunningGateway, **fields: Any) -> dict[str, Any]:
    """Return the last chunk of a stream if it has no choices, else an empty dictionary."""
    with gateway.stream(**fields) as response:
        text = response.read().decode()
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    chunk: dict[str, Any] = json.loads(events[-2])
    return {} if chunk["choices"] else chunk


@pytest.mark.parametrize(
    ("include", "fields", "expected"),
    [
        ("on_request", {}, False),
        ("on_request", WITH_METRICS, True),
        ("with_usage", {}, True),
        ("with_usage", WITH_METRICS, True),
        ("always", {}, True),
    ],
)
def test_a_response_has_metrics_on_request_or_by_policy(
    tmp_path: Path, worker: ScriptedWorker, include: str, fields: dict[str, Any], expected: bool
) -> None:
    with gateway_with_policy(tmp_path, worker, metrics={"include": include}) as gateway:
        response = gateway.chat(**fields).json()
        assert response.get("metrics") == (METRICS if expected else None)
        assert ("metrics" in response, response["usage"]) == (expected, USAGE)
        assert response["choices"][0]["message"]["content"] == "one two three"
        assert gateway.status()["recent"]["mtp"]["accepted"] == 1, (
            "the gateway always counts drafts"
        )


@pytest.mark.parametrize(
    ("include", "fields", "expected"),
    [
        ("on_request", {}, (False, False)),
        ("on_request", WITH_METRICS, (True, True)),
        ("on_request", WITH_USAGE, (True, False)),
        ("on_request", {**WITH_METRICS, **WITH_USAGE}, (True, True)),
        ("with_usage", {}, (False, False)),
        ("with_usage", WITH_METRICS, (True, True)),
        ("with_usage", WITH_USAGE, (True, True)),
        ("always", {}, (True, True)),
    ],
)
def test_the_last_chunk_has_metrics_on_request_or_by_policy(
    tmp_path: Path,
    worker: ScriptedWorker,
    include: str,
    fields: dict[str, Any],
    expected: tuple[bool, bool],
) -> None:
    """The expected pair is usage and metrics."""
    usage, metrics = expected
    with gateway_with_policy(tmp_path, worker, metrics={"include": include}) as gateway:
        last = last_chunk(gateway, **fields)
        assert last.get("usage") == (USAGE if usage else None)
        assert last.get("metrics") == (METRICS if metrics else None)
        assert gateway.status()["recent"]["mtp"]["accepted"] == 1, (
            "the gateway always counts drafts"
        )


def test_the_shipped_policy_includes_metrics_with_usage(
    gateway_with_worker: RunningGateway,
) -> None:
    assert MetricsRules().include == "with_usage"
    assert gateway_with_worker.chat().json()["metrics"] == METRICS
    assert last_chunk(gateway_with_worker) == {}
    assert last_chunk(gateway_with_worker, **WITH_USAGE)["metrics"] == METRICS


@pytest.mark.parametrize(
    "invalid_metrics",
    [
        5,
        {"speculative_decoding": 5},
        {"speculative_decoding": {"num_spec_steps": "many", "num_draft_tokens": -4}},
        {"speculative_decoding": {"num_draft_tokens": 1, "num_accepted_draft_tokens": 2}},
        {"speculative_decoding": {"num_spec_steps": 10**30, "acceptance_histogram": [None, "x"]}},
        {"speculative_decoding": {"num_draft_tokens": 1}, "draft_sources": [5]},
        {"speculative_decoding": {}, "draft_sources": {"head": 5, "lookup": {"accepted": 9}}},
    ],
)
def test_invalid_metrics_of_a_worker_are_relayed_and_corrupt_no_sum(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, invalid_metrics: Any
) -> None:
    worker.script.body = json.dumps(
        {"choices": [{"message": {"content": "x"}}], "usage": USAGE, "metrics": invalid_metrics}
    ).encode()
    assert gateway_with_worker.chat(temperature=0).json()["metrics"] == invalid_metrics
    mtp = gateway_with_worker.status()["recent"]["mtp"]
    assert mtp["attempted"] == mtp["accepted"] + mtp["rejected"] + mtp["errors"]
