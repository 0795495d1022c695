"""Prefix affinity: requests follow their conversation and their system prompt to a worker that has
them cached.
"""

import json
from typing import Any

import pytest
from httpx import Response

from tests.support.gateway_fixtures import Served
from tests.support.policies import PolicyAdmin
from tests.support.prefix_claims import RULES
from tests.support.running_gateway import RunningGateway, said, wait_until
from tests.support.scripted_worker import (
    USAGE,
    ReceivedRequest,
    Script,
    ScriptedWorker,
    chat_completion,
)

LONG = "You are the clerk of a small harbour and answer in one sentence. " * 8
Pair = tuple[ScriptedWorker, ScriptedWorker]


def fields_of(system: str = LONG, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Who are you?"}]
    return {"messages": messages, **fields}


def script_with_cached(cached: int) -> Script:
    """Return a script whose usage reports so many cached prompt tokens."""
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return Script(body=json.dumps(chat_completion("Clerk.") | {"usage": USAGE | details}).encode())


def worker_of(response: Response) -> str:
    assert response.is_success, response.text
    return response.headers["x-paceline-worker"]


def explained(gateway: RunningGateway, messages: Any) -> Any:
    body = {"model": "demo", "messages": messages}
    return gateway.client.post("/v1/route/explain", json=body).json()


def cordon(gateway: RunningGateway, worker_id: str, method: str = "PUT") -> None:
    path = f"/admin/v1/workers/{worker_id}/cordon"
    assert gateway.admin.request(method, path).is_success


def keys_of(received: ReceivedRequest) -> list[str]:
    return received.headers["x-paceline-prefix-keys"].split(",")


@pytest.fixture
def workers(worker: ScriptedWorker, second_worker: ScriptedWorker) -> Pair:
    return worker, second_worker


@pytest.fixture
def two_worker_gateway(gateway: RunningGateway, workers: Pair) -> RunningGateway:
    for worker in workers:
        gateway.join(worker)
    return gateway


def test_requests_follow_their_system_prompt_to_its_worker(two_worker_gateway, workers) -> None:
    prompts = [fields_of(f"{number}. {LONG}") for number in range(20)]
    first = [worker_of(two_worker_gateway.chat(**one)) for one in prompts]
    assert {*first} == {"fake-a", "fake-b"}, "new system prompts are distributed"
    for _ in range(3):
        assert [worker_of(two_worker_gateway.chat(**one)) for one in prompts] == first
    keys = [{tuple(keys_of(received)) for received in worker.requests} for worker in workers]
    assert keys[0].isdisjoint(keys[1])
    assert len(keys[0] | keys[1]) == 20


def test_the_prefix_header_shows_the_workers_cached_tokens_and_for_a_stream_the_predicted_ones(
    served: Served,
) -> None:
    served.worker.script = script_with_cached(0)
    assert served.gateway.chat(**fields_of()).headers["x-paceline-prefix"] == "miss"
    served.worker.script = script_with_cached(90)
    assert served.gateway.chat(**fields_of()).headers["x-paceline-prefix"] == "hit"
    assert served.gateway.chat().headers["x-paceline-prefix"] == "none"
    counts = served.gateway.status()["prefix"]
    assert counts == {
        "hit": 1,
        "miss": 1,
        "none": 1,
        "unknown": 0,
        "tokens_by_kind": {},
        "not_reused": {},
    }
    served.worker.script, other = Script(), fields_of(f"Another one. {LONG}")
    answers = [served.gateway.chat(stream=True, **other) for _ in range(2)]
    assert [one.headers["x-paceline-prefix"] for one in answers] == ["miss", "hit"]


def test_a_failed_request_creates_no_claim(served: Served) -> None:
    served.worker.script = Script(drop=True)
    assert served.gateway.chat(**fields_of()).status_code >= 500
    served.worker.script = Script()
    predicted = served.gateway.chat(stream=True, **fields_of()).headers["x-paceline-prefix"]
    assert predicted == "miss"


def test_an_explanation_has_every_score_the_holder_of_the_prefix_and_unavailable_workers(
    two_worker_gateway: RunningGateway,
) -> None:
    chosen = worker_of(two_worker_gateway.chat(**fields_of()))
    shown = explained(two_worker_gateway, **fields_of())
    holder, other = shown["candidates"]
    assert (holder["worker_id"], holder["prefix_cached"]) == (chosen, True)
    assert not other["prefix_cached"]
    assert {holder["worker_id"], other["worker_id"]} == {"fake-a", "fake-b"}
    assert other["score_s"] >= other["prefill_s"] > 0
    assert holder["score_s"] >= holder["prefill_s"] > 0
    assert shown["unavailable"] == {}
    cordon(two_worker_gateway, "fake-b")
    shown = explained(two_worker_gateway, **fields_of())
    assert [candidate["worker_id"] for candidate in shown["candidates"]] == ["fake-a"]
    assert shown["unavailable"] == {"fake-b": "cordoned"}


class Chat:
    """A conversation with a gateway, which grows turn by turn."""

    def __init__(self, gateway: RunningGateway, name: str) -> None:
        self._gateway = gateway
        self.messages: list[Any] = said(f"{name}: tell me of the harbour. {LONG}")["messages"]

    def ask(self, path: str = "/v1/chat/completions") -> Response:
        body = {"model": "demo", "max_tokens": 20, "messages": self.messages}
        response = self._gateway.client.post(path, json=body).raise_for_status()
        self.messages += [
            {"role": "assistant", "content": "Clerk."},
            {"role": "user", "content": f"And then, {len(self.messages)}?"},
        ]
        return response

    def worker(self, path: str = "/v1/chat/completions") -> str:
        return worker_of(self.ask(path))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_each_turn_of_a_conversation_goes_to_the_worker_of_the_last_one(
    two_worker_gateway: RunningGateway, workers: Pair, path: str
) -> None:
    chats = [Chat(two_worker_gateway, str(n)) for n in range(12)]
    first = [chat.worker(path) for chat in chats]
    assert set(first) == {"fake-a", "fake-b"}, "new conversations are distributed"
    for _ in range(4):
        assert [chat.worker(path) for chat in chats] == first
    sent = [keys_of(received) for worker in workers for received in worker.requests]
    assert {len(keys) for keys in sent} == {2, 4, 5}
    assert {keys[-1] for keys in sent} == {"-"}, "no system prompt"
    longest = [keys[0] for keys in sent]
    assert len(set(longest)) == len(longest) == 12 * 5
    for keys in sent:
        if len(keys) > 2:
            assert keys[2] in longest, "the end of the turn before"


def holder_and_other(workers: Pair, worker_id: str) -> Pair:
    """Return the worker with an id, and the other one."""
    first, second = workers
    return (first, second) if first.worker_id == worker_id else (second, first)


def test_a_conversation_moves_when_its_worker_leaves_and_stays_there(
    two_worker_gateway: RunningGateway, workers: Pair
) -> None:
    for worker in workers:
        worker.remembers = True
    chat = Chat(two_worker_gateway, "c")
    before = chat.worker()
    assert chat.worker() == before
    cordon(two_worker_gateway, before)
    after = chat.worker()
    assert after != before
    cordon(two_worker_gateway, before, "DELETE")
    # Both have its beginning now, but the other one has more of it.
    chat.messages[-1]["content"] += LONG
    assert [chat.worker() for _ in range(3)] == [after] * 3
    assert two_worker_gateway.status()["prefix"]["not_reused"] == {"other Mac": 1}
    # A worker that refuses the connection loses no turn.
    holder_and_other(workers, after)[0].script = Script(status=503)
    assert [chat.worker() for _ in range(2)] == [before] * 2


def test_a_worker_that_keeps_no_conversation_loses_its_claims(two_worker_gateway, workers) -> None:
    chat = Chat(two_worker_gateway, "c")
    holder, _ = holder_and_other(workers, chat.worker())
    holder.script = script_with_cached(0)
    assert chat.worker() == holder.worker_id
    status = two_worker_gateway.status()["prefix"]
    assert status["not_reused"] == {"evicted": 1}
    candidates = explained(two_worker_gateway, chat.messages)["candidates"]
    assert [one["cached_tokens"] for one in candidates] == [0, 0]
    assert not candidates[0]["prefix_cached"]


@pytest.mark.parametrize(
    ("isolation", "same_team", "other_team"),
    [("key", False, False), ("team", True, False), ("none", True, True)],
)
def test_prefix_keys_are_shared_only_within_the_policys_isolation(
    served: Served, admin: PolicyAdmin, *, isolation: str, same_team: bool, other_team: bool
) -> None:
    """S50 (CVE-2025-46570): isolation prevents timing attacks on the prompts of other callers."""
    assert admin.patch({"prefix": {"isolation": isolation}}).is_success
    for team in ("lab", "lab", "shop"):
        served.gateway.use_key(served.gateway.create_key(team=team)["secret"])
        assert served.gateway.chat(**fields_of()).is_success
    ann, bob, eve = map(keys_of, served.worker.requests)
    for end in range(2):
        assert (ann[end] == bob[end], ann[end] == eve[end]) == (same_team, other_team)


def test_c8_a_worker_must_not_cache_a_system_prompt_that_is_too_short_for_a_key(served) -> None:
    served.gateway.chat(**fields_of("Be brief."))
    assert keys_of(served.worker.requests[0]) == ["-"]
    assert served.gateway.status()["prefix"]["none"] == 1


def test_a_key_without_a_team_shares_no_scope() -> None:
    assert RULES.scope("1", "") != RULES.scope("2", "")
    assert RULES.scope("team:lab", "") != RULES.scope("1", "lab")
    assert RULES.scope("", "") == ""


def test_a_started_gateway_learns_cached_prefixes_from_heartbeats(
    two_worker_gateway: RunningGateway, workers: Pair
) -> None:
    first = worker_of(two_worker_gateway.chat(**fields_of()))
    holder, other = holder_and_other(workers, first)
    key = keys_of(holder.requests[0])[-1]
    two_worker_gateway.rejoin(holder)
    two_worker_gateway.join(other, prefixes=[key], prefix_count=1)
    assert worker_of(two_worker_gateway.chat(**fields_of())) == other.worker_id


def test_the_right_mac_is_named_after_an_hour_and_after_a_restart_of_its_worker(
    two_worker_gateway: RunningGateway, workers: Pair
) -> None:
    chat = Chat(two_worker_gateway, "c")
    holder, other = holder_and_other(workers, chat.worker())
    keys = keys_of(holder.requests[0])

    def expected_at() -> set[str]:
        # The gateway takes each jump of its clock for a moment of overload.
        wait_until(lambda: "candidates" in explained(two_worker_gateway, chat.messages))
        candidates = explained(two_worker_gateway, chat.messages)["candidates"]
        return {one["worker_id"] for one in candidates if one["prefix_cached"]}

    for boot_id in (holder.boot_id, "restarted"):
        holder.boot_id = boot_id
        for _ in range(12):
            two_worker_gateway.clock.advance(300)
            two_worker_gateway.join(holder, held_prefixes=keys)
            two_worker_gateway.join(other)
        assert expected_at() == {holder.worker_id}


def test_a_turn_elsewhere_names_who_has_the_earlier_ones_and_no_client_can(
    two_worker_gateway: RunningGateway, workers: Pair
) -> None:
    forged = {"x-paceline-prefix-sources": json.dumps([{"url": "http://evil:1", "tokens": 9}])}
    two_worker_gateway.client.headers.update(forged)
    fields = fields_of()
    first = worker_of(two_worker_gateway.chat(**fields))
    cordon(two_worker_gateway, first)
    answer = {"role": "assistant", "content": "The clerk."}
    fields["messages"] += [answer, {"role": "user", "content": "Of which harbour?"}]
    assert worker_of(two_worker_gateway.chat(**fields)) != first
    holder, taker = holder_and_other(workers, first)
    (alone,), (moved,) = holder.requests, taker.requests
    assert "x-paceline-prefix-sources" not in alone.headers
    assert json.loads(moved.headers["x-paceline-prefix-sources"]) == [
        {"url": holder.url, "tokens": USAGE["prompt_tokens"], "server_name": ""}
    ]
