"""Prefix affinity: requests follow their conversation and their system prompt to a worker that has
them cached.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from httpx import Response

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
    gateway_with_worker.join(second_worker)
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
    assert counts == {
        "hit": 1,
        "miss": 1,
        "none": 1,
        "unknown": 0,
        "index_size": 2,
        "mispredicted": 0,
        "tokens_by_kind": {},
        "not_reused": {},
    }


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


class Chat:
    """A conversation with a gateway, which grows turn by turn."""

    def __init__(self, gateway: RunningGateway, name: str) -> None:
        self._gateway = gateway
        self.messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"{name}: tell me of the harbour. {LONG}"}
        ]

    def ask(self, path: str = "/v1/chat/completions") -> Response:
        """Send the conversation, and append the answer and the next question."""
        body = {"model": "demo", "max_tokens": 20, "messages": self.messages}
        response = self._gateway.client.post(path, json=body).raise_for_status()
        self.messages += [
            {"role": "assistant", "content": "Clerk."},
            {"role": "user", "content": f"And then, {len(self.messages)}?"},
        ]
        return response

    def worker(self, path: str = "/v1/chat/completions") -> str:
        """Send the next turn, and return the worker that answered."""
        return self.ask(path).headers["x-paceline-worker"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_each_turn_of_a_conversation_goes_to_the_worker_of_the_last_one(
    two_worker_gateway: RunningGateway,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    path: str,
) -> None:
    chats = [Chat(two_worker_gateway, str(n)) for n in range(12)]
    first = [chat.worker(path) for chat in chats]
    assert set(first) == {"fake-a", "fake-b"}, "new conversations are distributed"
    for _ in range(4):
        assert [chat.worker(path) for chat in chats] == first
    sent = [
        received.headers["x-paceline-prefix-keys"].split(",")
        for received in (*worker.requests, *second_worker.requests)
    ]
    assert {len(keys) for keys in sent} == {2, 4, 5}
    assert {keys[-1] for keys in sent} == {"-"}, "no system prompt"
    longest = [keys[0] for keys in sent]
    assert len(set(longest)) == len(longest) == 12 * 5
    for keys in sent:
        if len(keys) > 2:
            assert keys[2] in longest, "the end of the turn before"


def test_a_conversation_moves_when_its_worker_leaves_and_stays_there(
    two_worker_gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    workers = {one.worker_id: one for one in (worker, second_worker)}
    worker.remembers = second_worker.remembers = True
    chat = Chat(two_worker_gateway, "c")
    before = chat.worker()
    assert chat.worker() == before
    assert two_worker_gateway.admin.put(f"/admin/v1/workers/{before}/cordon").is_success
    after = chat.worker()
    assert after != before
    assert two_worker_gateway.admin.delete(f"/admin/v1/workers/{before}/cordon").is_success
    # Both have its beginning now, but the other one has more of it.
    chat.messages[-1]["content"] += LONG
    assert [chat.worker() for _ in range(3)] == [after] * 3
    assert two_worker_gateway.status()["prefix"]["not_reused"] == {"other Mac": 1}
    # A worker that refuses the connection loses no turn.
    workers[after].script = Script(status=503)
    assert chat.worker() == before
    assert chat.worker() == before


def test_a_worker_that_keeps_no_conversation_loses_its_claims(
    two_worker_gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    chat = Chat(two_worker_gateway, "c")
    holder = {one.worker_id: one for one in (worker, second_worker)}[chat.worker()]
    holder.script = script_with_cached(0)
    assert chat.worker() == holder.worker_id
    status = two_worker_gateway.status()["prefix"]
    assert (status["mispredicted"], status["index_size"]) == (1, 0)
    assert status["not_reused"] == {"evicted": 1}
    body = {"model": "demo", "messages": chat.messages}
    explained = two_worker_gateway.client.post("/v1/route/explain", json=body).json()
    assert [one["cached_tokens"] for one in explained["candidates"]] == [0, 0]


def test_a_worker_that_reports_an_eviction_is_not_preferred(
    two_worker_gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    chat = Chat(two_worker_gateway, "c")
    holder = {one.worker_id: one for one in (worker, second_worker)}[chat.worker()]
    key = holder.requests[0].headers["x-paceline-prefix-keys"].split(",")[0]
    body = {"model": "demo", "messages": chat.messages}

    def expected_at() -> set[str]:
        explained = two_worker_gateway.client.post("/v1/route/explain", json=body).json()
        return {one["worker_id"] for one in explained["candidates"] if one["prefix_cached"]}

    assert expected_at() == {holder.worker_id}
    two_worker_gateway.send_heartbeat(holder, evicted_prefixes=[key])
    assert expected_at() == set()
    chat.ask()
    assert two_worker_gateway.status()["prefix"]["not_reused"] == {"evicted": 1}


def test_an_edited_message_is_named(gateway_with_worker: RunningGateway) -> None:
    chat = Chat(gateway_with_worker, "c")
    for _ in range(5):
        chat.ask()
    chat.messages[4] = {"role": "user", "content": "Something else."}
    chat.ask()
    prefix = gateway_with_worker.status()["prefix"]
    assert prefix["not_reused"] == {"changed at message 5": 1}


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


def test_a_turn_elsewhere_names_who_has_the_earlier_ones_and_no_client_can(
    two_worker_gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    forged = {"x-paceline-prefix-sources": json.dumps([{"url": "http://evil:1", "tokens": 9}])}
    fields = fields_of()

    def ask() -> str:
        body = {"model": "demo", **fields}
        response = two_worker_gateway.client.post("/v1/chat/completions", json=body, headers=forged)
        return response.headers["x-paceline-worker"]

    first = ask()
    assert two_worker_gateway.admin.put(f"/admin/v1/workers/{first}/cordon").is_success
    answer = {"role": "assistant", "content": "The clerk."}
    fields["messages"] += [answer, {"role": "user", "content": "Of which harbour?"}]
    second = ask()
    assert second != first
    holder, taker = (worker, second_worker) if first == "fake-a" else (second_worker, worker)
    (alone,), (moved,) = holder.requests, taker.requests
    assert "x-paceline-prefix-sources" not in alone.headers
    assert json.loads(moved.headers["x-paceline-prefix-sources"]) == [
        {"url": holder.url, "tokens": USAGE["prompt_tokens"]}
    ]
