"""Whom a secret belongs to, and what its holder may see and use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from gateway.auth.api_keys import ApiKeys
from gateway.auth.records import KeyTerms, new_key
from gateway.errors import KeyRefused
from policies.document import Priority
from tests.support.running_gateway import (
    RunningGateway,
    chat_body,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import Script, ScriptedWorker


def keyring(*terms: KeyTerms, static: str | None = None) -> tuple[ApiKeys, list[str]]:
    ring = ApiKeys(
        SecretStr(static) if static else None,
        clock=lambda: 0.0,
        wall=lambda: 0.0,
        used_on_day=lambda _key, _unix_s: 0,
        on_end=lambda _key_ids: None,
    )
    made = [new_key(one, datetime.fromtimestamp(0, UTC)) for one in terms]
    ring.replace([record for record, _ in made])
    return ring, [secret for _, secret in made]


def test_two_keys_that_begin_alike_are_two_callers() -> None:
    """S05 (CVE-2026-35030): nothing is remembered under a part of a secret."""
    ring, (secret,) = keyring(KeyTerms(name="a"))
    found = ring.authenticate(f"Bearer {secret}".encode())
    for other in (secret[:40], secret[:20], secret + "x", secret[:-1] + "!", secret.upper()):
        with pytest.raises(KeyRefused):
            ring.authenticate(f"Bearer {other}".encode())
    assert found.caller.key.startswith("key-")


@given(st.binary(max_size=200))
def test_no_other_bytes_open_anything(offered: bytes) -> None:
    """S04, S06, S14 (CVE-2026-42208, CVE-2026-59822): all is 401, none an identity."""
    ring, _ = keyring(KeyTerms(name="a"), static="static-secret")
    for authorization in (offered, b"Bearer " + offered, b"bearer\t" + offered):
        if authorization.strip() != b"Bearer static-secret":
            with pytest.raises(KeyRefused):
                ring.authenticate(authorization)


def test_unknown_wrong_expired_and_revoked_keys_get_one_answer(
    gateway_with_worker: RunningGateway,
) -> None:
    """S13 (CVE-2025-59425, CVE-2026-23996): the same words for all, and the same way there."""
    made = gateway_with_worker.create_key()
    gateway_with_worker.admin.delete(f"/admin/v1/keys/{made['id']}")
    offered = (
        None,
        "Bearer x",
        f"Bearer {made['secret']}",
        "Basic x",
        "Bearer",
        "Bearer \xe9\x80",
    )
    responses = set()
    for authorization in offered:
        headers = [(b"authorization", authorization.encode("latin-1"))] if authorization else []
        response = gateway_with_worker.client.post(
            "/v1/chat/completions", json=chat_body(), headers=headers
        )
        responses.add((response.status_code, response.text, response.headers["www-authenticate"]))
    assert len(responses) == 1
    assert next(iter(responses))[0] == 401


def test_the_static_key_stays_a_key_without_limits(tmp_path: Path, worker: ScriptedWorker) -> None:
    settings = make_settings(tmp_path, api_key=SecretStr("static-secret"))
    with RunningGateway(settings) as gateway:
        gateway.send_heartbeat(worker)
        made = gateway.create_key(requests_a_minute=1)
        gateway.use_key("static-secret")
        for _ in range(3):
            assert gateway.chat().status_code == 200
        gateway.use_key(made["secret"])
        assert [gateway.chat().status_code for _ in range(2)] == [200, 429]
        used = gateway.admin.get("/admin/v1/usage").json()["keys"]
        assert {key: row["requests"] for key, row in used.items()} == {"static": 3, made["id"]: 1}


@pytest.fixture
def two_model_gateway(
    gateway_with_worker: RunningGateway, second_worker: ScriptedWorker
) -> RunningGateway:
    """A gateway with the models `demo` and `other`."""
    second_worker.model = "other"
    assert gateway_with_worker.send_heartbeat(second_worker).status_code == 200
    return gateway_with_worker


def test_a_model_that_a_key_may_not_use_does_not_exist_for_it(
    two_model_gateway: RunningGateway,
) -> None:
    line = two_model_gateway
    line.use_key(line.create_key(models=["demo"])["secret"])
    assert line.chat().status_code == 200
    assert line.chat(model="gpt-4o-mini").status_code == 200, "an alias of it"
    barred, unknown = line.chat(model="other"), line.chat(model="no-such-model")
    assert status_and_code(barred) == status_and_code(unknown) == (404, "model_not_found")
    assert barred.text.replace("other", "X") == unknown.text.replace("no-such-model", "X")
    listed = [entry["id"] for entry in line.client.get("/v1/models").json()["data"]]
    assert "demo" in listed
    assert "other" not in listed
    assert status_and_code(line.client.get("/v1/models/other")) == (404, "model_not_found")
    explained = line.client.post("/v1/route/explain", json=chat_body(model="other"))
    assert status_and_code(explained) == (404, "model_not_found")
    assert status_and_code(line.client.get("/v1/status")) == (403, "permission_denied")


def test_pools_that_a_key_may_not_use_are_left_out(gateway_with_worker: RunningGateway) -> None:
    gateway_with_worker.use_key(gateway_with_worker.create_key(pools=["vlm"])["secret"])
    greedy = gateway_with_worker.chat(temperature=0)
    assert greedy.headers["x-paceline-pool"] == "vlm"
    explained = gateway_with_worker.client.post(
        "/v1/route/explain", json=chat_body(temperature=0)
    ).json()
    assert {one["pool"] for one in explained["candidates"]} == {"vlm"}


def test_a_key_with_no_pool_of_the_route_is_told_so(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.use_key(
        gateway_with_worker.create_key(pools=["text-mtp"], requests_a_minute=5)["secret"]
    )
    assert gateway_with_worker.chat(temperature=0).status_code == 200
    sampled = gateway_with_worker.chat(temperature=1)
    assert status_and_code(sampled) == (403, "pool_not_allowed")
    assert sampled.headers["x-ratelimit-remaining-requests"] == "4"
    explained = gateway_with_worker.client.post("/v1/route/explain", json=chat_body(temperature=1))
    assert status_and_code(explained) == (403, "pool_not_allowed")
    assert len(worker.requests) == 1


def test_no_request_ever_spills_to_a_pool_of_others(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    """The key's pools hold in the waiting line too, where a request is decided on anew."""
    gateway_with_worker.use_key(gateway_with_worker.create_key(pools=["text-mtp"])["secret"])
    worker.script = Script(hang_after=2)
    with ThreadPoolExecutor(8) as pool:

        def ask(_: int) -> str:
            with gateway_with_worker.stream(temperature=0) as response:
                response.read()
                return response.headers["x-paceline-pool"]

        asked = [pool.submit(ask, one) for one in range(6)]
        wait_until(lambda: worker.in_flight == 4)
        pools = gateway_with_worker.client.get("/metrics").text
        assert 'paceline_pool_waiting{pool="text-mtp"} 2.0' in pools
        worker.resume.set()
        assert {one.result(30) for one in asked} == {"text-mtp"}


@pytest.mark.parametrize(
    ("highest", "asked", "status"),
    [
        (Priority.INTERACTIVE, Priority.INTERACTIVE, 200),
        (Priority.DEFAULT, Priority.INTERACTIVE, 400),
        (Priority.DEFAULT, Priority.BULK, 200),
        (Priority.BULK, Priority.DEFAULT, 400),
        (Priority.BULK, Priority.BULK, 200),
    ],
)
def test_a_request_asks_for_no_more_priority_than_its_key_has(
    gateway_with_worker: RunningGateway, highest: Priority, asked: Priority, status: int
) -> None:
    gateway_with_worker.use_key(gateway_with_worker.create_key(priority=highest)["secret"])
    headers = {"x-paceline-priority": asked}
    response = gateway_with_worker.client.post(
        "/v1/chat/completions", json=chat_body(), headers=headers
    )
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] == "x-paceline-priority"
        assert asked not in response.json()["error"]["message"].partition(": ")[2].split(", ")
