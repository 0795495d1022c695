"""What admins decide at one gateway holds at all that share its Redis: keys, limits, the policy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from tests.support.gateway_fixtures import Makes
from tests.support.running_gateway import Gateway, error_of, eventually
from tests.support.scripted_worker import DONE, FakeWorker, Script


def soon_at(gateway: Gateway, holds: Callable[[], bool]) -> None:
    """Wait for what is to hold within two seconds, not counting those in which Redis was away."""
    left_s, until_s, began_s = 2.0, time.monotonic() + 60, time.monotonic()
    while not holds():
        time.sleep(0.02)
        answers = "paceline_store_degraded 0.0" in gateway.client.get("/metrics").text
        since_s, began_s = began_s, time.monotonic()
        left_s -= began_s - since_s if answers else 0.0
        assert left_s > 0, "it did not come true in time"
        assert began_s < until_s, "Redis is away"


def test_a_key_that_is_revoked_at_one_gateway_opens_no_other(
    makes: Makes, worker: FakeWorker
) -> None:
    first, second = makes(), makes()
    first.join(worker)
    key = first.make_key()
    eventually(lambda: second.chat().status_code == 401)
    second.bear(key["secret"])
    eventually(lambda: second.chat().status_code == 200)
    assert first.admin.delete(f"/admin/v1/keys/{key['id']}").is_success
    soon_at(second, lambda: second.chat().status_code == 401)


def test_the_policy_of_one_is_the_policy_of_all(makes: Makes) -> None:
    first, second = makes(), makes()
    now = first.admin.get("/admin/v1/policy")
    changed = first.admin.patch(
        "/admin/v1/policy",
        content=json.dumps({"models": {"other": {}}}),
        headers={
            "content-type": "application/merge-patch+json",
            "if-match": now.headers["etag"],
            "x-paceline-author": "tests",
            "x-paceline-note": "see it at the other",
        },
    )
    assert changed.status_code == 200, changed.text

    def followed() -> bool:
        told = second.admin.get("/admin/v1/policy")
        return bool(told.headers["etag"].strip('"') == changed.json()["etag"])

    soon_at(second, followed)


def two_with_one_key(makes: Makes, worker: FakeWorker, **limits: int) -> tuple[Gateway, Gateway]:
    """Give two gateways that share a worker, and ask with a key of these limits from now on."""
    first, second = makes(), makes()
    first.join(worker)
    secret = first.make_key(**limits)["secret"]
    eventually(lambda: second.chat().status_code == 401)
    first.bear(secret)
    second.bear(secret)
    return first, second


def test_a_limit_is_one_over_all_gateways(makes: Makes, worker: FakeWorker) -> None:
    first, second = two_with_one_key(makes, worker, requests_a_minute=6, concurrent_requests=5)
    assert [first.chat().status_code for _ in range(4)] == [200] * 4

    def told() -> bool:
        left = second.client.post("/v1/chat/completions", json={}).headers
        return dict(left).get("x-ratelimit-remaining-requests") == "2"

    eventually(told)
    answers = [second.chat() for _ in range(4)]
    assert [answer.status_code for answer in answers].count(200) == 2
    assert error_of(answers[-1]) == (429, "requests_a_minute_exceeded")


def test_a_daily_budget_is_one_over_all_gateways(makes: Makes, worker: FakeWorker) -> None:
    first, second = two_with_one_key(makes, worker, tokens_a_day=100)
    assert [first.chat(max_tokens=5).status_code for _ in range(8)] == [200] * 8

    def told() -> bool:
        left = second.client.post("/v1/chat/completions", json={}).headers
        return dict(left).get("x-ratelimit-remaining-tokens") == "20"

    eventually(told)
    assert second.chat(max_tokens=5).status_code == 200
    assert error_of(second.chat(max_tokens=20)) == (429, "tokens_a_day_exceeded")


def test_requests_at_once_are_counted_over_all_gateways(makes: Makes, worker: FakeWorker) -> None:
    first, second = two_with_one_key(makes, worker, concurrent_requests=1)
    worker.script = Script(hang_after=1)
    with first.stream() as answer:
        pieces = answer.iter_raw()
        next(pieces)
        worker.script = Script()
        eventually(lambda: second.chat().status_code == 429)
        worker.go_on.set()
        assert b"".join(pieces).endswith(DONE)
    eventually(lambda: second.chat().status_code == 200)
