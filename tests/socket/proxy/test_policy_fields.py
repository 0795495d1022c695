"""Fields of the policy, each tested at the socket, and the metrics in responses."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.config.static_workers import pool_problems
from gateway.proxy import forward
from policies.document import read_policy
from policies.routes import DAYS
from policies.sections import MetricsRules
from tests.support.chat_bodies import TOOL
from tests.support.gateway_fixtures import Served
from tests.support.images import data_url, png_header
from tests.support.policies import DEFAULT_ROUTE, PolicyAdmin, gateway_with_policy
from tests.support.running_gateway import RunningGateway, chat_body, status_and_code, wait_until
from tests.support.scripted_worker import METRICS, USAGE, Script, ScriptedWorker
from tests.support.static_workers import static_worker

PREFERRED = {"vlm": {"lanes": "vlm", "weights": {"fake-a": 1000}}}
"""Pools with a first choice among the workers."""
EXPLAIN = "/v1/route/explain"


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def drafts_of(gateway: RunningGateway) -> tuple[int, int]:
    """Return the attempted and accepted tokens of the window, by the responses in it."""
    history = gateway.status()["history"]
    return sum(one["attempted"] for one in history), sum(one["accepted"] for one in history)


def pool_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-paceline-pool"]


def pools(*names: str) -> dict[str, Any]:
    """Return pools of the same lanes; requests go to `vlm` unless a route says otherwise."""
    return {name: {"lanes": "vlm"} for name in (*names, "vlm")}


def routes(pool: str = "special", **when: Any) -> list[Any]:
    return [{"name": pool, "when": when, "to": pool}, DEFAULT_ROUTE]


def messages_of(content: Any, count: int = 1) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index in range(count)]
    return {"messages": messages}


def with_images(*sizes_px: tuple[int, int]) -> dict[str, Any]:
    urls = [data_url(png_header(*size)) for size in sizes_px]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return messages_of([*parts, {"type": "text", "text": "What is it?"}])


def test_a_route_matches_requests_that_meet_its_conditions(
    gateway_with_worker: RunningGateway, second_worker: ScriptedWorker, admin: PolicyAdmin
) -> None:
    second_worker.model = "other"
    gateway_with_worker.join(second_worker)
    conditions: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"media": True}, with_images((2, 2))),
        ({"mtp_eligible": True}, {"temperature": 0}),
        ({"greedy": True}, {"temperature": 0, "n": 2}),
        ({"stream": True}, {"stream": True}),
        ({"features": {"tools": True}}, {"tools": [TOOL]}),
        ({"features": {"structured_output": True}}, {"response_format": {"type": "json_object"}}),
        ({"features": {"thinking_budget": True}}, {"thinking_budget": 9}),
        ({"prompt_chars": {"at_most": 3}}, messages_of("x")),
        ({"max_tokens": {"at_most": 9}}, {"max_tokens": 9}),
        ({"messages": {"at_least": 3}}, messages_of("x" * 20, 3)),
        ({"model": "other"}, {"model": "other"}),
    )
    for when, fields in conditions:
        admin.use(routes=routes(**when), pools=pools("special"))
        assert pool_of(gateway_with_worker.chat(**fields)) == "special", when
        assert pool_of(gateway_with_worker.chat()) == "vlm", when


def test_the_policy_makes_the_answers_of_a_model_exact_unless_a_request_says_otherwise(
    served: Served, admin: PolicyAdmin
) -> None:
    admin.use(models={"demo": {"exact": True}})
    gateway, long = served.gateway, messages_of("x" * 400)
    response = gateway.chat(temperature=0, **long)
    assert response.headers["x-paceline-reason"] == "exact"
    assert response.headers["x-paceline-prefix"] == "none"
    gateway.chat(temperature=0, exact=False, **long)
    assert [one.body.get("exact") for one in served.worker.requests] == [True, False]
    assert gateway.status()["decisions"]["bypass_counts"]["exact"] == 1
    status, param, message = error_of(gateway.chat(draft_tokens=2))
    assert (status, param) == (400, "draft_tokens")
    assert "exact" in message


def test_an_exact_answer_is_asked_of_no_engine_of_another_kind(tmp_path, worker) -> None:
    static_workers = (static_worker(url=worker.url, models=["demo"], pools=["vlm"]),)
    with gateway_with_policy(tmp_path, static_workers=static_workers) as gateway:
        status, param, message = error_of(gateway.chat(exact=True))
        assert (status, param) == (400, "exact")
        assert "exact answers" in message
        assert gateway.chat(exact=False).status_code == 200
    assert [one.body.get("exact") for one in worker.requests] == [None]


def test_l4_a_route_matches_requests_with_its_header_in_utf_8_as_the_policy_is_written(
    gateway_with_worker: RunningGateway, admin: PolicyAdmin
) -> None:
    batch, team = routes("batch", header={"x-batch": ["yes", "please"]})[0], "Zürich"
    admin.use(
        routes=[batch, *routes("team", header={"x-team": team})], pools=pools("batch", "team")
    )
    for name, value, pool in (
        (b"x-other", b"yes", "vlm"),
        (b"X-Batch", b"please", "batch"),
        (b"x-batch", b"no", "vlm"),
        (b"x-team", team.encode(), "team"),
        (b"x-team", team.encode("latin-1"), "team"),
        (b"x-team", b"Z\xffrich", "vlm"),
    ):
        gateway_with_worker.client.headers = httpx.Headers([(name, value)])
        assert pool_of(gateway_with_worker.chat()) == pool, (name, value)


def test_a_route_matches_requests_in_its_hours_and_days(gateway_with_worker, admin) -> None:
    now = time.localtime()
    around = f"{(now.tm_hour - 2) % 24:02}:00-{(now.tm_hour + 2) % 24:02}:59"
    before = f"{(now.tm_hour - 4) % 24:02}:00-{(now.tm_hour - 3) % 24:02}:59"
    today = [DAYS[now.tm_wday], DAYS[(now.tm_wday + 1) % 7]]  # the test may run over midnight
    past = [
        {"name": "past", "when": {"hours": before}, "to": "past"},
        {"name": "another-day", "when": {"days": [*{*DAYS} - {*today}]}, "to": "past"},
    ]
    current = [routes("now", hours=around, stream=True)[0], *routes("today", days=today)]
    admin.use(routes=past + current, pools=pools("past", "now", "today"))
    assert pool_of(gateway_with_worker.chat(stream=True)) == "now"
    assert pool_of(gateway_with_worker.chat()) == "today"


def test_a_pool_contains_only_workers_with_its_labels(tmp_path, worker, second_worker) -> None:
    labelled = {"vlm": {"lanes": "vlm", "workers": {"labels": ["fake-b"]}}}
    with gateway_with_policy(tmp_path, worker, second_worker, pools=labelled) as gateway:
        responses = [gateway.chat() for _ in range(5)]
        assert {response.headers["x-paceline-worker"] for response in responses} == {"fake-b"}
        status = gateway.status()
        pool = status["pools"]["vlm"]
        assert (pool["workers"], pool["slots"]) == (["fake-b"], 4)
        assert status["workers"]["fake-b"]["labels"] == ["fake-b"]
        assert 'paceline_pool_slots{pool="vlm"} 4.0' in gateway.client.get("/metrics").text


def test_limits_of_the_policy_limit_requests(served: Served, admin: PolicyAdmin) -> None:
    gateway = served.gateway
    admin.use(limits={"max_tokens": 99})
    too_many = (400, "max_tokens", "'max_tokens' may be at most 99.")
    assert error_of(gateway.chat(max_tokens=100)) == too_many
    assert error_of(gateway.chat(max_completion_tokens=100))[:2] == (400, "max_completion_tokens")
    assert gateway.chat().status_code == gateway.chat(max_completion_tokens=7).status_code == 200
    assert [received.body.get("max_tokens") for received in served.worker.requests] == [99, None]

    admin.use(limits={"prompt_chars": 20})
    assert gateway.chat(**messages_of("x" * 20)).status_code == 200
    status, param, message = error_of(gateway.chat(**messages_of("x" * 11, 2)))
    assert (status, param) == (400, "messages")
    assert "at most 20 characters" in message
    prompt = gateway.client.post("/v1/completions", json={"model": "demo", "prompt": "x" * 21})
    assert error_of(prompt)[:2] == (400, "prompt")

    admin.use(limits={"request_timeout_s": 0.1})
    served.worker.script = Script(hang=True)
    assert status_and_code(gateway.chat()) == (504, "request_timeout")


def test_media_outside_the_policys_limits_are_rejected(served: Served, admin: PolicyAdmin) -> None:
    small = (2, 2)
    for number, (media, images, expected) in enumerate(
        (
            ({"kinds": []}, [small], "'image' content is not allowed, only: text."),
            ({"kinds": ["audio"]}, [small], "only: text, audio."),
            ({"pictures": 1}, [small, small], "at most 1 pictures"),
            ({"pixels": 99}, [(10, 10)], "at most 99 pixels"),
        )
    ):
        admin.use(media=media)
        status, param, message = error_of(served.gateway.chat(**with_images(*images)))
        assert (status, param) == (400, "messages")
        assert expected in message
        assert served.gateway.chat().status_code == 200
        assert len(served.worker.requests) == number + 1


def test_a_policy_without_retries_denies_them(tmp_path, worker, second_worker) -> None:
    policy: dict[str, Any] = {"pools": PREFERRED, "retries": {"share": 0, "at_least": 0}}
    busy = Script(status=503, headers=((b"retry-after", b"1"),))
    with gateway_with_policy(tmp_path, worker, second_worker, **policy) as gateway:
        for script, status in ((Script(status=500), 502), (busy, 503)):
            worker.script = script
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
    tmp_path, worker, second_worker, monkeypatch, *, script, margin_s
) -> None:
    assert forward._READ_MARGIN_S == 1
    monkeypatch.setattr(forward, "_READ_MARGIN_S", margin_s)
    worker.script, second_worker.script = Script(status=500), script
    policy: dict[str, Any] = {"pools": PREFERRED, "retries": {"share": 0, "at_least": 1}}
    with (
        gateway_with_policy(tmp_path, worker, second_worker, **policy) as gateway,
        ThreadPoolExecutor(2) as executor,
    ):
        responses = [executor.submit(gateway.chat, stream=True) for _ in range(2)]
        wait_until(lambda: second_worker.in_flight == 2)
        second_worker.resume.set()
        assert {response.result().status_code for response in responses} == {200}


def test_a_static_worker_has_the_labels_of_its_entry(tmp_path, worker, second_worker) -> None:
    big = {"vlm": {"lanes": "vlm", "workers": {"labels": "big"}}, "rest": {"lanes": "vlm"}}
    static_workers = (
        static_worker(id="small", url=worker.url, pools=["vlm"]),
        static_worker(id="large", url=second_worker.url, pools=["vlm"], labels=["big"]),
    )
    with gateway_with_policy(tmp_path, static_workers=static_workers, pools=big) as gateway:
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
    gateway_with_worker: RunningGateway, admin: PolicyAdmin
) -> None:
    admin.use(routes=routes("batch", header={"x-batch": "yes"}), pools=pools("batch"))
    headers = {"x-batch": "yes", "x-other": "z"}
    response = gateway_with_worker.client.post(EXPLAIN, json=chat_body(), headers=headers)
    explanation = response.json()
    assert explanation["route"] == "batch"
    assert explanation["caller"]["headers"] == {"x-batch": "yes"}


WITH_METRICS = {"metrics": "summary"}
WITH_USAGE = {"stream_options": {"include_usage": True}}


def last_chunk(gateway: RunningGateway, **fields: Any) -> dict[str, Any]:
    """Return the last chunk of a stream if it has no choices, else an empty dictionary."""
    text = gateway.chat(stream=True, **fields).text
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    chunk: dict[str, Any] = json.loads(events[-2])
    return {} if chunk["choices"] else chunk


def test_a_response_has_metrics_on_request_or_by_policy(gateway_with_worker, admin) -> None:
    gateway = gateway_with_worker
    for include, asked, expected in (
        ("on_request", {}, False),
        ("on_request", WITH_METRICS, True),
        ("with_usage", {}, True),
        ("with_usage", WITH_METRICS, True),
        ("always", {}, True),
    ):
        admin.use(metrics={"include": include})
        response = gateway.chat(**asked).json()
        assert response.get("metrics") == (METRICS if expected else None), (include, asked)
        assert ("metrics" in response, response["usage"]) == (expected, USAGE)
        assert response["choices"][0]["message"]["content"] == "one two three"
    assert drafts_of(gateway)[1] == 5, "the gateway always counts drafts"


def test_the_last_chunk_has_usage_and_metrics_on_request_or_by_policy(
    gateway_with_worker: RunningGateway, admin: PolicyAdmin
) -> None:
    gateway = gateway_with_worker
    for include, asked, usage, metrics in (
        ("on_request", {}, None, None),
        ("on_request", WITH_METRICS, USAGE, METRICS),
        ("on_request", WITH_USAGE, USAGE, None),
        ("on_request", {**WITH_METRICS, **WITH_USAGE}, USAGE, METRICS),
        ("with_usage", {}, None, None),
        ("with_usage", WITH_METRICS, USAGE, METRICS),
        ("with_usage", WITH_USAGE, USAGE, METRICS),
        ("always", {}, USAGE, METRICS),
    ):
        admin.use(metrics={"include": include})
        last = last_chunk(gateway, **asked)
        assert (last.get("usage"), last.get("metrics")) == (usage, metrics), (include, asked)
    assert drafts_of(gateway)[1] == 8, "the gateway always counts drafts"


def test_the_shipped_policy_includes_metrics_with_usage(gateway_with_worker) -> None:
    assert MetricsRules().include == "with_usage"
    assert gateway_with_worker.chat().json()["metrics"] == METRICS
    assert last_chunk(gateway_with_worker) == {}
    assert last_chunk(gateway_with_worker, **WITH_USAGE)["metrics"] == METRICS


def test_invalid_metrics_of_a_worker_are_relayed_and_corrupt_no_sum(served: Served) -> None:
    answer = {"choices": [{"message": {"content": "x"}}], "usage": USAGE}
    invalid: tuple[Any, ...] = (
        5,
        {"speculative_decoding": 5},
        {"speculative_decoding": {"num_spec_steps": "many", "num_draft_tokens": -4}},
        {"speculative_decoding": {"num_draft_tokens": 1, "num_accepted_draft_tokens": 2}},
        {"speculative_decoding": {"num_spec_steps": 10**30, "acceptance_histogram": [None, "x"]}},
    )
    for metrics in invalid:
        served.worker.script.body = json.dumps({**answer, "metrics": metrics}).encode()
        assert served.gateway.chat(temperature=0).json()["metrics"] == metrics
        attempted, accepted = drafts_of(served.gateway)
        assert attempted >= accepted
