"""Authentication by secret, and the models, pools and priorities that a key may use."""

import functools
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import SecretStr

from gateway.auth.api_keys import ApiKeys
from gateway.auth.records import KeyTerms, new_key
from gateway.errors import KeyRefused
from paceline.request.profile import Priority
from tests.support.rate_limit_model import ALL_LIMITS
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    chat_body,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import Script, ScriptedWorker


def keyring(*terms: KeyTerms, static: str | None = None) -> tuple[ApiKeys, list[str]]:
    ring = ApiKeys(
        SecretStr(static) if static else None,
        None,
        clock=lambda: 0.0,
        wall=lambda: 0.0,
        used_on_day=lambda _key, _unix_s: 0,
        on_end=lambda _key_ids: None,
    )
    created = [new_key(key_terms, datetime.fromtimestamp(0, UTC)) for key_terms in terms]
    ring.replace([record for record, _ in created], {})
    return ring, [secret for _, secret in created]


def test_a_secret_that_shares_a_prefix_with_a_key_is_rejected() -> None:
    """S05 (CVE-2026-35030): the gateway looks up whole secrets, never a part of one."""
    ring, (secret,) = keyring(KeyTerms(name="a"))
    authenticated = ring.authenticate(f"Bearer {secret}".encode())
    for other in (secret[:40], secret[:20], secret + "x", secret[:-1] + "!", secret.upper()):
        with pytest.raises(KeyRefused):
            ring.authenticate(f"Bearer {other}".encode())
    assert authenticated.caller.key.startswith("key-")


@given(st.binary(max_size=200))
@example(b"static-secret")
def test_arbitrary_bytes_authenticate_no_caller(offered: bytes) -> None:
    """S04, S06, S14 (CVE-2026-42208, CVE-2026-59822): every invalid header returns 401."""
    ring, _ = keyring(KeyTerms(name="a"), static="static-secret")
    for scheme in (b"", b"Bearer ", b"bearer\t", b"Basic  ", b"Token: "):
        authorization = scheme + offered
        if authorization.strip() != b"Bearer static-secret":
            with pytest.raises(KeyRefused):
                ring.authenticate(authorization)


def test_a_key_is_unlimited_without_any_limit_and_its_repr_contains_no_digest() -> None:
    assert KeyTerms(name="a").unlimited
    assert not KeyTerms(name="a", **ALL_LIMITS.model_dump()).unlimited
    record, _ = new_key(KeyTerms(name="a"), datetime.fromtimestamp(0, UTC))
    assert record.digest not in repr(record)


def test_unknown_and_malformed_keys_get_identical_responses(shared_gateway) -> None:
    """S13 (CVE-2025-59425, CVE-2026-23996): the gateway returns the same body and headers for
    every unknown key, along the same code path; only the whole secret of a revoked one is told."""
    revoked = shared_gateway.create_key()
    shared_gateway.revoke_key(revoked)
    known = bearer_headers(revoked)["authorization"].encode()
    responses = set()
    for offered in (b"", b"Bearer x", known[:-1], b"Basic x", b"Bearer", b"Bearer \xe9\x80"):
        response = shared_gateway.client.post(
            "/v1/chat/completions",
            json=chat_body(),
            headers=[(b"authorization", offered)] if offered else [],
        )
        responses.add((response.status_code, response.text, response.headers["www-authenticate"]))
    ((status, _, _),) = responses
    assert status == 401


def test_the_static_key_has_no_limits_beside_limited_keys(make_gateway, worker) -> None:
    gateway = make_gateway(worker, api_key=SecretStr("static-secret"))
    gateway.use_key("static-secret")
    assert [gateway.chat().status_code for _ in range(3)] == [200] * 3
    limited = gateway.use_new_key(requests_a_minute=1)
    assert [gateway.chat().status_code for _ in range(2)] == [200, 429]
    usage = gateway.admin.get("/admin/v1/usage").json()["keys"]
    requests = {key: row["requests"] for key, row in usage.items()}
    assert requests == {"static": 3, limited["id"]: 1}


def test_a_model_outside_a_keys_scope_looks_like_an_unknown_model(
    gateway_with_worker: RunningGateway, second_worker: ScriptedWorker
) -> None:
    gateway = gateway_with_worker
    second_worker.model = "other"
    gateway.join(second_worker)
    gateway.use_new_key(models=["demo"])
    assert gateway.chat().status_code == 200
    assert gateway.chat(model="gpt-4o-mini").status_code == 200, "an alias of it"
    forbidden, unknown = gateway.chat(model="other"), gateway.chat(model="no-such-model")
    explained = gateway.client.post("/v1/route/explain", json=chat_body(model="other"))
    for response in (forbidden, unknown, explained, gateway.client.get("/v1/models/other")):
        assert status_and_code(response) == (404, "model_not_found")
    assert forbidden.text.replace("other", "X") == unknown.text.replace("no-such-model", "X")
    listed = [entry["id"] for entry in gateway.client.get("/v1/models").json()["data"]]
    assert "demo" in listed
    assert "other" not in listed
    assert status_and_code(gateway.client.get("/v1/status")) == (403, "permission_denied")


def test_routing_skips_pools_outside_a_keys_scope_and_rejects_without_any(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    def explain(**fields: Any) -> httpx.Response:
        return shared_gateway.client.post("/v1/route/explain", json=chat_body(**fields))

    shared_gateway.use_new_key(pools=["vlm"])
    assert shared_gateway.chat(temperature=0).headers["x-paceline-pool"] == "vlm"
    assert {one["pool"] for one in explain(temperature=0).json()["candidates"]} == {"vlm"}
    shared_gateway.use_new_key(pools=["text-mtp"], requests_a_minute=5)
    assert shared_gateway.chat(temperature=0).status_code == 200
    sampled = shared_gateway.chat(temperature=1)
    assert status_and_code(sampled) == (403, "pool_not_allowed")
    assert sampled.headers["x-ratelimit-remaining-requests"] == "4"
    assert status_and_code(explain(temperature=1)) == (403, "pool_not_allowed")
    assert {one.body["temperature"] for one in module_worker.requests} == {0}


def test_a_queued_request_never_spills_to_a_pool_outside_the_keys_scope(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    """The key's pools also apply when the scheduler routes a queued request again."""
    gateway_with_worker.use_new_key(pools=["text-mtp"])
    worker.script = Script(hang_after=2)
    waiting = 'paceline_pool_waiting{pool="text-mtp"} 2.0'
    with ThreadPoolExecutor(6) as pool:
        chat = functools.partial(gateway_with_worker.chat, temperature=0, stream=True)
        requests = [pool.submit(chat) for _ in range(6)]
        wait_until(lambda: worker.in_flight == 4)
        wait_until(lambda: waiting in gateway_with_worker.client.get("/metrics").text)
        worker.resume.set()
        used = {request.result(30).headers["x-paceline-pool"] for request in requests}
    assert used == {"text-mtp"}


@pytest.mark.parametrize(
    ("highest", "requested", "status"),
    [
        (Priority.INTERACTIVE, Priority.INTERACTIVE, 200),
        (Priority.DEFAULT, Priority.INTERACTIVE, 400),
        (Priority.DEFAULT, Priority.BULK, 200),
        (Priority.BULK, Priority.DEFAULT, 400),
        (Priority.BULK, Priority.BULK, 200),
    ],
)
def test_a_priority_above_the_maximum_of_the_key_returns_400(
    shared_gateway: RunningGateway, highest: Priority, requested: Priority, status: int
) -> None:
    shared_gateway.use_new_key(priority=highest)
    response = shared_gateway.chat(headers={"x-paceline-priority": requested})
    assert response.status_code == status
    if status == 400:
        error = response.json()["error"]
        assert error["param"] == "x-paceline-priority"
        assert requested not in error["message"].partition(": ")[2].split(", ")
