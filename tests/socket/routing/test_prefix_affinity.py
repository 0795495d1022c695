"""System prompts: requests follow theirs to the worker that holds it, and are not misled by it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.prefix_affinity import PrefixNames
from gateway.types import Caller, Inspected
from policies.request.profile import Endpoint, RequestProfile
from tests.support.prefix_claims import RULES
from tests.support.running_gateway import RunningGateway, bearing, settings_for_tests
from tests.support.scripted_worker import USAGE, FakeWorker, Script, whole_answer

LONG = "You are the clerk of a small harbour and answer in one sentence. " * 8


def asked(system: str = LONG, **fields: Any) -> dict[str, Any]:
    said = [{"role": "system", "content": system}, {"role": "user", "content": "Who are you?"}]
    return {"messages": said, **fields}


def counted(cached: int) -> Script:
    """Answer that so many tokens of the prompt were not read again."""
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return Script(body=json.dumps(whole_answer("Clerk.") | {"usage": USAGE | details}).encode())


@pytest.fixture
def pair(line: RunningGateway, second_worker: FakeWorker) -> RunningGateway:
    """A gateway with two workers."""
    assert line.join(second_worker).status_code == 200
    return line


def test_requests_follow_their_system_prompt_to_the_worker_that_holds_it(
    pair: RunningGateway, worker: FakeWorker, second_worker: FakeWorker
) -> None:
    first = {pair.chat(**asked(f"{n}. {LONG}")).headers["x-paceline-worker"] for n in range(20)}
    assert first == {"fake-a", "fake-b"}, "those that nobody holds are spread"
    for number in range(20):
        at = {
            pair.chat(**asked(f"{number}. {LONG}")).headers["x-paceline-worker"] for _ in range(3)
        }
        assert len(at) == 1
    names = [{heard.headers["x-paceline-prefix-key"] for heard in one.heard}
             for one in (worker, second_worker)]  # fmt: skip
    assert names[0].isdisjoint(names[1])
    assert len(names[0] | names[1]) == 20


def test_the_header_tells_what_the_worker_has_counted(
    line: RunningGateway, worker: FakeWorker
) -> None:
    worker.script = counted(0)
    assert line.chat(**asked()).headers["x-paceline-prefix"] == "miss"
    worker.script = counted(90)
    assert line.chat(**asked()).headers["x-paceline-prefix"] == "hit"
    assert line.chat().headers["x-paceline-prefix"] == "none"
    told = line.status()["prefix"]
    assert told == {"hit": 1, "miss": 1, "none": 1, "known": 1, "untrue": 0}


def test_a_stream_tells_what_is_expected(line: RunningGateway) -> None:
    expected = []
    for _ in range(2):
        with line.stream(**asked()) as answer:
            expected.append(answer.headers["x-paceline-prefix"])
            answer.read()
    assert expected == ["miss", "hit"]


def test_a_claim_is_dropped_where_the_worker_has_counted_otherwise(
    line: RunningGateway, worker: FakeWorker
) -> None:
    worker.script = counted(0)
    for _ in range(2):
        line.chat(**asked())
    assert (told := line.status()["prefix"])["untrue"] == 1
    assert told["known"] == 0
    explained = line.client.post("/v1/route/explain", json={"model": "demo", **asked()}).json()
    assert not explained["candidates"][0]["holder"]


def test_a_request_that_failed_leaves_no_claim(line: RunningGateway, worker: FakeWorker) -> None:
    worker.script = Script(drop=True)
    assert line.chat(**asked()).status_code >= 500
    assert line.status()["prefix"]["known"] == 0


def test_an_explanation_says_who_holds_it(pair: RunningGateway) -> None:
    at = pair.chat(**asked()).headers["x-paceline-worker"]
    explained = pair.client.post("/v1/route/explain", json={"model": "demo", **asked()}).json()
    assert [one["holder"] for one in explained["candidates"]] == [True, False]
    assert explained["candidates"][0]["worker_id"] == at


def test_an_explanation_tells_every_score_and_why_others_take_nothing(pair: RunningGateway) -> None:
    body = {"model": "demo", **asked()}
    told = pair.client.post("/v1/route/explain", json=body).json()
    assert {one["worker_id"] for one in told["candidates"]} == {"fake-a", "fake-b"}
    assert all(one["score_s"] >= one["read_s"] > 0 for one in told["candidates"])
    assert told["left_out"] == {}
    assert pair.admin.put("/admin/v1/workers/fake-b/cordon").is_success
    told = pair.client.post("/v1/route/explain", json=body).json()
    assert [one["worker_id"] for one in told["candidates"]] == ["fake-a"]
    assert told["left_out"] == {"fake-b": "cordoned"}


@pytest.mark.parametrize(
    ("isolation", "same_team", "other_team"),
    [("key", False, False), ("team", True, False), ("none", True, True)],
)
def test_only_those_whom_the_policy_lets_share_have_one_name(
    tmp_path: Path, worker: FakeWorker, isolation: str, same_team: bool, other_team: bool
) -> None:
    """S50 (CVE-2025-46570): whoever may not share cannot learn by its time that somebody asked."""
    with RunningGateway(settings_for_tests(tmp_path)) as gateway:
        gateway.join(worker)
        edit = {
            "if-match": gateway.admin.get("/admin/v1/policy").headers["etag"],
            "content-type": "application/merge-patch+json",
            "x-paceline-note": "test",
        }
        patch = json.dumps({"prefix": {"isolation": isolation}})
        assert gateway.admin.patch("/admin/v1/policy", content=patch, headers=edit).is_success
        for team in ("lab", "lab", "shop"):
            key = bearing(gateway.make_key(team=team))
            body = {"model": "demo", **asked()}
            assert gateway.client.post("/v1/chat/completions", json=body, headers=key).is_success
    ann, bob, eve = (heard.headers["x-paceline-prefix-key"] for heard in worker.heard)
    assert (ann == bob, ann == eve) == (same_team, other_team)


def test_too_little_to_look_for_has_no_name(line: RunningGateway, worker: FakeWorker) -> None:
    line.chat(**asked("Be brief."))
    assert "x-paceline-prefix-key" not in worker.heard[0].headers
    assert line.status()["prefix"]["none"] == 1


def inspected(**body: Any) -> Inspected:
    profile = RequestProfile(endpoint=Endpoint.CHAT, model=body.pop("model", "demo"))
    return Inspected("demo", profile, {**asked(), **body})


def test_a_name_depends_on_all_that_is_shared_and_on_nothing_else() -> None:
    """S50 (CVE-2025-25183, CVE-2025-46722): it is keyed, so nobody outside can make one, and of
    whole texts, so two of them never meet."""
    names = PrefixNames(b"secret")
    lab = Caller(key="1", team="lab")
    name = names.name(inspected(), lab, RULES)
    assert re.fullmatch("[0-9a-f]{32}", name)
    said = [asked()["messages"][0], {"role": "user", "content": "Something else?"}]
    assert names.name(inspected(messages=said, temperature=0), lab, RULES) == name
    assert names.name(inspected(), Caller(key="2", team="lab"), RULES) == name
    others = {
        names.name(inspected(model="large"), lab, RULES),
        names.name(inspected(tools=[{"type": "function"}]), lab, RULES),
        names.name(inspected(chat_template_kwargs={"enable_thinking": False}), lab, RULES),
        names.name(inspected(**asked(LONG + "!")), lab, RULES),
        names.name(inspected(), Caller(key="1", team="shop"), RULES),
        names.name(inspected(), Caller(key="1"), RULES),
        PrefixNames(b"other").name(inspected(), lab, RULES),
    }
    assert len(others - {name}) == 7


def test_one_whose_key_has_no_team_shares_with_nobody_else() -> None:
    assert RULES.scope("1", "") != RULES.scope("2", "")
    assert RULES.scope("team:lab", "") != RULES.scope("1", "lab")
    assert RULES.scope("", "") == ""


def test_a_gateway_that_starts_learns_from_heartbeats_who_holds_what(
    gateway: RunningGateway, worker: FakeWorker, second_worker: FakeWorker
) -> None:
    gateway.join(worker)
    gateway.join(second_worker)
    gateway.chat(**asked())
    name = (worker.heard or second_worker.heard)[0].headers["x-paceline-prefix-key"]
    other = second_worker if worker.heard else worker
    gateway.leave(worker if worker.heard else second_worker)
    gateway.join(worker if worker.heard else second_worker, boot_id="boot-2")
    gateway.join(other, prefixes=[name], prefixes_held=1)
    answer = gateway.chat(**asked())
    assert answer.headers["x-paceline-worker"] == other.worker_id
