"""Prefix affinity: requests follow their conversation and their system prompt to a worker that has
them cached.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefix_claims import RULES
from tests.support.running_gateway import RunningGateway, bearer_headers, make_settings
from tests.support.scripted_worker import USAGE, Script, ScriptedWorker, chat_completion

LONG = "You are the clerk of a small harbour and answer in one sentence. " * 8


def fields_of(system: str = LONG, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Who are you?"}]
    return {"messages": messages, **fields}


def script_with_cached(cached: int) -> Script:
    """Return a script whose usage reports so many cached prompt tokens."""
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return Script(body=json.dumps(chat_completion("Clerk.") | {"usage": USAGE | details}).encode())


@pytest.fixture
def two_worker_gateway(
    gateway_with_worker: RunningGateway, second_worker: ScriptedWorker
) -> RunningGateway:
    """Return a gateway with two workers."""
    assert gateway_with_worker.send_heartbeat(second_worker).status_code == 200
    return gateway_with_worker


def test_requests_follow_their_system_prompt_to_its_worker(
    two_worker_gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    first = {
        two_worker_gateway.chat(**fields_of(f"{n}. {LONG}")).headers["x-paceline-worker"]
        for n in range(20)
    }
    assert first == {"fake-a", "fake-b"}, "new system prompts are distributed"
    for number in range(20):
        chosen = {
            two_worker_gateway.chat(**fields_of(f"{number}. {LONG}")).headers["x-paceline-worker"]
            for _ in range(3)
        }
        assert len(chosen) == 1
    keys = [{received.headers["x-paceline-prefix-keys"] for received in member.requests}
             for member in (worker, second_worker)]  # fmt: skip
    assert keys[0].isdisjoint(keys[1])
    assert len(keys[0] | keys[1]) == 20


def test_the_prefix_header_shows_the_workers_cached_tokens(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = script_with_cached(0)
    assert gateway_with_worker.chat(**fields_of()).headers["x-paceline-prefix"] == "miss"
    worker.script = script_with_cached(90)
    assert gateway_with_worker.chat(**fields_of()).headers["x-paceline-prefix"] == "hit"
    assert gateway_with_worker.chat().headers["x-paceline-prefix"] == "none"
    counts = gateway_with_worker.status()["prefix"]
    assert counts == {"hit": 1, "miss": 1, "none": 1, "index_size": 2, "mispredicted": 0}


def test_a_stream_has_the_predicted_prefix_header(gateway_with_worker: RunningGateway) -> None:
    expected = []
    for _ in range(2):
        with gateway_with_worker.stream(**fields_of()) as response:
            expected.append(response.headers["x-paceline-prefix"])
            response.read()
    assert expected == ["miss", "hit"]


def test_a_claim_is_removed_when_the_worker_reports_a_miss(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = script_with_cached(0)
    for _ in range(2):
        gateway_with_worker.chat(**fields_of())
    assert (counts := gateway_with_worker.status()["prefix"])["mispredicted"] == 1
    assert counts["index_size"] == 0
    explained = gateway_with_worker.client.post(
        "/v1/route/explain", json={"model": "demo", **fields_of()}
    ).json()
    assert not explained["candidates"][0]["prefix_cached"]


def test_a_failed_request_creates_no_claim(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(drop=True)
    assert gateway_with_worker.chat(**fields_of()).status_code >= 500
    assert gateway_with_worker.status()["prefix"]["index_size"] == 0


def test_an_explanation_names_the_worker_with_the_cached_prefix(
    two_worker_gateway: RunningGateway,
) -> None:
    chosen = two_worker_gateway.chat(**fields_of()).headers["x-paceline-worker"]
    explained = two_worker_gateway.client.post(
        "/v1/route/explain", json={"model": "demo", **fields_of()}
    ).json()
    assert [candidate["prefix_cached"] for candidate in explained["candidates"]] == [True, False]
    assert explained["candidates"][0]["worker_id"] == chosen


def test_an_explanation_has_every_score_and_unavailable_workers(
    two_worker_gateway: RunningGateway,
) -> None:
    body = {"model": "demo", **fields_of()}
    explanation = two_worker_gateway.client.post("/v1/route/explain", json=body).json()
    assert {candidate["worker_id"] for candidate in explanation["candidates"]} == {
        "fake-a",
        "fake-b",
    }
    assert all(
        candidate["score_s"] >= candidate["prefill_s"] > 0
        for candidate in explanation["candidates"]
    )
    assert explanation["unavailable"] == {}
    assert two_worker_gateway.admin.put("/admin/v1/workers/fake-b/cordon").is_success
    explanation = two_worker_gateway.client.post("/v1/route/explain", json=body).json()
    assert [candidate["worker_id"] for candidate in explanation["candidates"]] == ["fake-a"]
    assert explanation["unavailable"] == {"fake-b": "cordoned"}


@pytest.mark.parametrize(
    ("isolation", "same_team", "other_team"),
    [("key", False, False), ("team", True, False), ("none", True, True)],
)
def test_prefix_keys_are_shared_only_within_the_policys_isolation(
    tmp_path: Path, worker: ScriptedWorker, isolation: str, same_team: bool, other_team: bool
) -> None:
    """S50 (CVE-2025-46570): isolation prevents timing attacks on the prompts of other callers."""
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        edit = {
            "if-match": gateway.admin.get("/admin/v1/policy").headers["etag"],
            "content-type": "application/merge-patch+json",
            "x-paceline-note": "test",
        }
        patch = json.dumps({"prefix": {"isolation": isolation}})
        assert gateway.admin.patch("/admin/v1/policy", content=patch, headers=edit).is_success
        for team in ("lab", "lab", "shop"):
            key = bearer_headers(gateway.create_key(team=team))
            body = {"model": "demo", **fields_of()}
            assert gateway.client.post("/v1/chat/completions", json=body, headers=key).is_success
    ann, bob, eve = (
        received.headers["x-paceline-prefix-keys"].split(",") for received in worker.requests
    )
    for end in range(2):
        assert (ann[end] == bob[end], ann[end] == eve[end]) == (same_team, other_team)


def test_c8_a_worker_must_not_cache_a_system_prompt_that_is_too_short_for_a_key(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.chat(**fields_of("Be brief."))
    assert worker.requests[0].headers["x-paceline-prefix-keys"] == "-"
    assert gateway_with_worker.status()["prefix"]["none"] == 1


def test_a_key_without_a_team_shares_no_scope() -> None:
    assert RULES.scope("1", "") != RULES.scope("2", "")
    assert RULES.scope("team:lab", "") != RULES.scope("1", "lab")
    assert RULES.scope("", "") == ""


def test_a_started_gateway_learns_cached_prefixes_from_heartbeats(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway.send_heartbeat(worker)
    gateway.send_heartbeat(second_worker)
    gateway.chat(**fields_of())
    (received,) = worker.requests or second_worker.requests
    prefix_key = received.headers["x-paceline-prefix-keys"].split(",")[-1]
    other = second_worker if worker.requests else worker
    gateway.remove_worker(worker if worker.requests else second_worker)
    gateway.send_heartbeat(worker if worker.requests else second_worker, boot_id="boot-2")
    gateway.send_heartbeat(other, prefixes=[prefix_key], prefix_count=1)
    response = gateway.chat(**fields_of())
    assert response.headers["x-paceline-worker"] == other.worker_id
