"""System prompts: requests follow theirs to the worker that holds it, and are not misled by it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.prefix_affinity import PrefixHasher
from gateway.types import Caller, Inspected
from policies.request.profile import Endpoint, RequestProfile
from tests.support.prefix_claims import RULES
from tests.support.running_gateway import RunningGateway, bearer_headers, make_settings
from tests.support.scripted_worker import USAGE, Script, ScriptedWorker, chat_completion

LONG = "You are the clerk of a small harbour and answer in one sentence. " * 8


def asked(system: str = LONG, **fields: Any) -> dict[str, Any]:
    said = [{"role": "system", "content": system}, {"role": "user", "content": "Who are you?"}]
    return {"messages": said, **fields}


def counted(cached: int) -> Script:
    """Answer that so many tokens of the prompt were not read again."""
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return Script(body=json.dumps(chat_completion("Clerk.") | {"usage": USAGE | details}).encode())


@pytest.fixture
def two_worker_gateway(
    gateway_with_worker: RunningGateway, second_worker: ScriptedWorker
) -> RunningGateway:
    """A gateway with two workers."""
    assert gateway_with_worker.send_heartbeat(second_worker).status_code == 200
    return gateway_with_worker


def test_requests_follow_their_system_prompt_to_the_worker_that_holds_it(
    two_worker_gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    first = {
        two_worker_gateway.chat(**asked(f"{n}. {LONG}")).headers["x-paceline-worker"]
        for n in range(20)
    }
    assert first == {"fake-a", "fake-b"}, "those that nobody holds are spread"
    for number in range(20):
        at = {
            two_worker_gateway.chat(**asked(f"{number}. {LONG}")).headers["x-paceline-worker"]
            for _ in range(3)
        }
        assert len(at) == 1
    names = [{heard.headers["x-paceline-prefix-key"] for heard in one.requests}
             for one in (worker, second_worker)]  # fmt: skip
    assert names[0].isdisjoint(names[1])
    assert len(names[0] | names[1]) == 20


def test_the_header_tells_what_the_worker_has_counted(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = counted(0)
    assert gateway_with_worker.chat(**asked()).headers["x-paceline-prefix"] == "miss"
    worker.script = counted(90)
    assert gateway_with_worker.chat(**asked()).headers["x-paceline-prefix"] == "hit"
    assert gateway_with_worker.chat().headers["x-paceline-prefix"] == "none"
    told = gateway_with_worker.status()["prefix"]
    assert told == {"hit": 1, "miss": 1, "none": 1, "index_size": 1, "mispredicted": 0}


def test_a_stream_tells_what_is_expected(gateway_with_worker: RunningGateway) -> None:
    expected = []
    for _ in range(2):
        with gateway_with_worker.stream(**asked()) as response:
            expected.append(response.headers["x-paceline-prefix"])
            response.read()
    assert expected == ["miss", "hit"]


def test_a_claim_is_dropped_where_the_worker_has_counted_otherwise(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = counted(0)
    for _ in range(2):
        gateway_with_worker.chat(**asked())
    assert (told := gateway_with_worker.status()["prefix"])["mispredicted"] == 1
    assert told["index_size"] == 0
    explained = gateway_with_worker.client.post(
        "/v1/route/explain", json={"model": "demo", **asked()}
    ).json()
    assert not explained["candidates"][0]["prefix_cached"]


def test_a_request_that_failed_leaves_no_claim(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(drop=True)
    assert gateway_with_worker.chat(**asked()).status_code >= 500
    assert gateway_with_worker.status()["prefix"]["index_size"] == 0


def test_an_explanation_says_who_holds_it(two_worker_gateway: RunningGateway) -> None:
    at = two_worker_gateway.chat(**asked()).headers["x-paceline-worker"]
    explained = two_worker_gateway.client.post(
        "/v1/route/explain", json={"model": "demo", **asked()}
    ).json()
    assert [one["prefix_cached"] for one in explained["candidates"]] == [True, False]
    assert explained["candidates"][0]["worker_id"] == at


def test_an_explanation_tells_every_score_and_why_others_take_nothing(
    two_worker_gateway: RunningGateway,
) -> None:
    body = {"model": "demo", **asked()}
    told = two_worker_gateway.client.post("/v1/route/explain", json=body).json()
    assert {one["worker_id"] for one in told["candidates"]} == {"fake-a", "fake-b"}
    assert all(one["score_s"] >= one["prefill_s"] > 0 for one in told["candidates"])
    assert told["unavailable"] == {}
    assert two_worker_gateway.admin.put("/admin/v1/workers/fake-b/cordon").is_success
    told = two_worker_gateway.client.post("/v1/route/explain", json=body).json()
    assert [one["worker_id"] for one in told["candidates"]] == ["fake-a"]
    assert told["unavailable"] == {"fake-b": "cordoned"}


@pytest.mark.parametrize(
    ("isolation", "same_team", "other_team"),
    [("key", False, False), ("team", True, False), ("none", True, True)],
)
def test_only_those_whom_the_policy_lets_share_have_one_name(
    tmp_path: Path, worker: ScriptedWorker, isolation: str, same_team: bool, other_team: bool
) -> None:
    """S50 (CVE-2025-46570): whoever may not share cannot learn by its time that somebody asked."""
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
            body = {"model": "demo", **asked()}
            assert gateway.client.post("/v1/chat/completions", json=body, headers=key).is_success
    ann, bob, eve = (heard.headers["x-paceline-prefix-key"] for heard in worker.requests)
    assert (ann == bob, ann == eve) == (same_team, other_team)


def test_too_little_to_look_for_has_no_name(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.chat(**asked("Be brief."))
    assert "x-paceline-prefix-key" not in worker.requests[0].headers
    assert gateway_with_worker.status()["prefix"]["none"] == 1


def inspected(**body: Any) -> Inspected:
    profile = RequestProfile(endpoint=Endpoint.CHAT, model=body.pop("model", "demo"))
    return Inspected("demo", profile, {**asked(), **body})


def test_a_name_depends_on_all_that_is_shared_and_on_nothing_else() -> None:
    """S50 (CVE-2025-25183, CVE-2025-46722): it is keyed, so nobody outside can make one, and of
    whole texts, so two of them never meet."""
    names = PrefixHasher(b"secret")
    lab = Caller(key="1", team="lab")
    name = names.prefix_key(inspected(), lab, RULES)
    assert re.fullmatch("[0-9a-f]{32}", name)
    said = [asked()["messages"][0], {"role": "user", "content": "Something else?"}]
    assert names.prefix_key(inspected(messages=said, temperature=0), lab, RULES) == name
    assert names.prefix_key(inspected(), Caller(key="2", team="lab"), RULES) == name
    others = {
        names.prefix_key(inspected(model="large"), lab, RULES),
        names.prefix_key(inspected(tools=[{"type": "function"}]), lab, RULES),
        names.prefix_key(inspected(chat_template_kwargs={"enable_thinking": False}), lab, RULES),
        names.prefix_key(inspected(**asked(LONG + "!")), lab, RULES),
        names.prefix_key(inspected(), Caller(key="1", team="shop"), RULES),
        names.prefix_key(inspected(), Caller(key="1"), RULES),
        PrefixHasher(b"other").prefix_key(inspected(), lab, RULES),
    }
    assert len(others - {name}) == 7


def test_one_whose_key_has_no_team_shares_with_nobody_else() -> None:
    assert RULES.scope("1", "") != RULES.scope("2", "")
    assert RULES.scope("team:lab", "") != RULES.scope("1", "lab")
    assert RULES.scope("", "") == ""


def test_a_gateway_that_starts_learns_from_heartbeats_who_holds_what(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway.send_heartbeat(worker)
    gateway.send_heartbeat(second_worker)
    gateway.chat(**asked())
    name = (worker.requests or second_worker.requests)[0].headers["x-paceline-prefix-key"]
    other = second_worker if worker.requests else worker
    gateway.remove_worker(worker if worker.requests else second_worker)
    gateway.send_heartbeat(worker if worker.requests else second_worker, boot_id="boot-2")
    gateway.send_heartbeat(other, prefixes=[name], prefix_count=1)
    response = gateway.chat(**asked())
    assert response.headers["x-paceline-worker"] == other.worker_id
