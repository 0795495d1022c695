"""API keys: creation, changes at run time, expiry and revocation.

Also: warnings about a policy without the pools that keys name.
"""

from __future__ import annotations

import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.assembly import TIMING
from gateway.cli import main
from gateway.errors import StartupError
from gateway.server import Listening, serve
from tests.support.fake_clock import MovedClock
from tests.support.log_capture import LogCapture
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    chat_body,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, Script, ScriptedWorker
from workers.lifecycle import Shutdown


def test_a_secret_is_returned_once_and_stored_nowhere(
    gateway_with_worker: RunningGateway, tmp_path: Path
) -> None:
    created = gateway_with_worker.create_key(name="Ann", team="lab")
    assert re.fullmatch(r"pk-[A-Za-z0-9_-]{43}", created["secret"])
    assert created["secret"].startswith(created["prefix"])
    assert created["state"] == "active"
    listed = gateway_with_worker.admin.get("/admin/v1/keys").json()["keys"]
    assert listed == [{name: value for name, value in created.items() if name != "secret"}]
    assert gateway_with_worker.admin.get(f"/admin/v1/keys/{created['id']}").json() == listed[0]
    assert "digest" not in listed[0]
    state = (tmp_path / "state.json").read_text()
    assert created["id"] in state
    assert created["secret"] not in state


def test_a_response_with_a_secret_forbids_caching(
    shared_gateway: RunningGateway,
) -> None:
    response = shared_gateway.admin.post("/admin/v1/keys", json={"name": "Ann"})
    assert response.headers["cache-control"] == "no-store"


def test_a_key_authorizes_the_data_plane_and_survives_a_restart(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    with RunningGateway(make_settings(tmp_path)) as first:
        secret = first.create_key()["secret"]
    with RunningGateway(make_settings(tmp_path)) as second:
        second.send_heartbeat(worker)
        assert status_and_code(second.chat()) == (401, "invalid_api_key")
        second.use_key(secret)
        assert second.chat().status_code == 200
        assert second.client.get("/v1/models").status_code == 200


def test_after_the_first_key_every_request_requires_a_key(
    gateway_with_worker: RunningGateway,
) -> None:
    assert gateway_with_worker.chat().status_code == 200
    created = gateway_with_worker.create_key()
    assert status_and_code(gateway_with_worker.chat()) == (401, "invalid_api_key")
    gateway_with_worker.admin.delete(f"/admin/v1/keys/{created['id']}")
    assert status_and_code(gateway_with_worker.chat()) == (401, "invalid_api_key"), (
        "a revoked key still makes keys mandatory"
    )


def test_a_deleted_state_file_authorizes_no_request(
    gateway_with_worker: RunningGateway, tmp_path: Path
) -> None:
    created = gateway_with_worker.create_key()
    (tmp_path / "state.json").unlink()
    wait_until(
        lambda: (
            gateway_with_worker.client.get(
                "/v1/models", headers=bearer_headers(created)
            ).status_code
            == 401
        )
    )
    assert status_and_code(gateway_with_worker.chat()) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("terms", "param", "expected"),
    [
        ({"name": "a", "nmae": "b"}, "nmae", "unknown field"),
        ({"name": "=1+1"}, "name", "must match"),
        ({"name": "a\nb"}, "name", "must match"),
        ({}, "name", "is required"),
        ({"name": "a", "nmae": None}, "nmae", "unknown field"),
        ({"name": "a", "requests_a_minute": 0}, "requests_a_minute", "at least 1"),
        ({"name": "a", "requests_a_minute": True}, "requests_a_minute", "whole number"),
        ({"name": "a", "tokens_a_day": "9"}, "tokens_a_day", "whole number"),
        ({"name": "a", "models": ["gpt-4o-mini"]}, "models.0", "alias"),
        ({"name": "a", "pools": ["vlm", "vml"]}, "pools.1", "no pool"),
        ({"name": "a", "priority": "urgent"}, "priority", "interactive"),
        ({"name": "a", "expires_at": "2020-01-01T00:00:00Z"}, "expires_at", "past"),
        ({"name": "a", "expires_at": "2099-01-01T00:00:00"}, "expires_at", "timezone"),
        ({"name": "a", "id": "key-000000000000"}, "id", "unknown field"),
        ({"name": "a", "revoked_at": None, "digest": "0" * 64}, "revoked_at", "unknown field"),
    ],
)
def test_invalid_terms_are_named_and_create_no_key(
    module_gateway: RunningGateway, terms: dict[str, Any], param: str, expected: str
) -> None:
    """CVE-2026-47102: an admin sets listed fields only; the gateway rejects all other fields."""
    before = module_gateway.admin.get("/admin/v1/keys").json()
    response = module_gateway.admin.post("/admin/v1/keys", json=terms)
    assert status_and_code(response) == (400, "invalid_value")
    assert response.json()["error"]["param"] == param
    assert expected in response.json()["error"]["message"]
    assert module_gateway.admin.get("/admin/v1/keys").json() == before


def test_an_error_names_every_invalid_field(module_gateway: RunningGateway) -> None:
    response = module_gateway.admin.post("/admin/v1/keys", json={"team": "-", "tokens_a_day": -1})
    for field in ("name", "team", "tokens_a_day"):
        assert f"{field}: " in response.json()["error"]["message"]


def test_a_patch_changes_terms_at_run_time_and_null_removes_a_limit(
    shared_gateway: RunningGateway,
) -> None:
    created = shared_gateway.create_key(requests_a_minute=1)
    shared_gateway.use_key(created["secret"])
    assert shared_gateway.chat().status_code == 200
    assert status_and_code(shared_gateway.chat()) == (429, "requests_a_minute_exceeded")
    path = f"/admin/v1/keys/{created['id']}"
    changed = shared_gateway.admin.patch(
        path, json={"requests_a_minute": None, "team": "lab"}
    ).json()
    assert (changed["requests_a_minute"], changed["team"]) == (None, "lab")
    response = shared_gateway.chat()
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


def test_a_changed_limit_still_counts_earlier_requests(shared_gateway: RunningGateway) -> None:
    created = shared_gateway.create_key(requests_a_minute=5)
    shared_gateway.use_key(created["secret"])
    for _ in range(3):
        assert shared_gateway.chat().status_code == 200
    shared_gateway.admin.patch(f"/admin/v1/keys/{created['id']}", json={"requests_a_minute": 2})
    assert shared_gateway.chat().headers["x-ratelimit-remaining-requests"] == "1"


def test_an_unknown_key_returns_404(module_gateway: RunningGateway) -> None:
    path = "/admin/v1/keys/key-000000000000"
    for response in (
        module_gateway.admin.get(path),
        module_gateway.admin.delete(path),
        module_gateway.admin.patch(path, json={}),
    ):
        assert status_and_code(response) == (404, "key_not_found")


async def test_the_api_key_and_the_admin_key_must_differ(tmp_path: Path) -> None:
    """CVE-2026-114612: a shared secret would authorize data clients as admins."""
    same = SecretStr("the-same")
    settings = make_settings(tmp_path, api_key=same, admin_key=same)
    with pytest.raises(
        StartupError, match="PACELINE_API_KEY and PACELINE_ADMIN_KEY have the same value"
    ):
        await serve(settings, shutdown=Shutdown())


@pytest.mark.parametrize("name", ["api_key", "admin_key", "join_token"])
async def test_a_secret_invalid_as_a_header_value_fails_the_start_and_is_not_printed(
    tmp_path: Path, name: str
) -> None:
    invalid = {name: SecretStr("a-secret\n")}
    settings = make_settings(tmp_path).model_copy(update=invalid)
    with pytest.raises(StartupError, match=f"PACELINE_{name.upper()} contains") as error:
        await serve(settings, shutdown=Shutdown())
    assert "a-secret" not in str(error.value)


async def test_a_stored_key_permits_listening_beyond_loopback(tmp_path: Path) -> None:
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.create_key()
    settings = make_settings(tmp_path).model_copy(update={"host": "0.0.0.0"})
    shutdown = Shutdown()
    calls: list[Listening] = []

    def started(listening: Listening) -> None:
        calls.append(listening)
        shutdown.request()

    await serve(settings, shutdown=shutdown, started=started)
    assert [listening.keyed for listening in calls] == [True]
    assert calls[0].url.startswith("http://0.0.0.0:")


async def test_serve_reports_that_no_key_exists(tmp_path: Path) -> None:
    shutdown = Shutdown()
    calls: list[Listening] = []

    def started(listening: Listening) -> None:
        calls.append(listening)
        shutdown.request()

    await serve(make_settings(tmp_path), shutdown=shutdown, started=started)
    assert [listening.keyed for listening in calls] == [False]


@pytest.fixture
def corrupt_key_id(tmp_path: Path) -> str:
    """Return the id of the only key in a state file; its record is invalid."""
    with RunningGateway(make_settings(tmp_path)) as gateway:
        created = gateway.create_key()
    state = json.loads((tmp_path / "state.json").read_text())
    state["keys"][created["id"]]["priorty"] = "bulk"
    (tmp_path / "state.json").write_text(json.dumps(state))
    return str(created["id"])


def test_c15_a_start_skips_an_unreadable_key_and_still_requires_one(
    corrupt_key_id: str, tmp_path: Path, worker: ScriptedWorker, log_capture: LogCapture
) -> None:
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        assert gateway.chat().status_code == 401
        gateway.use_key(gateway.create_key()["secret"])
        assert gateway.chat().status_code == 200
    message = f"record.skipped kind=keys name='{corrupt_key_id}'"
    assert log_capture.texts.count(message) == 1


def test_c15_a_key_whose_revocation_is_unreadable_is_rejected(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    with RunningGateway(make_settings(tmp_path)) as gateway:
        key = gateway.create_key()
        gateway.admin.delete(f"/admin/v1/keys/{key['id']}")
    state = json.loads((tmp_path / "state.json").read_text())
    state["keys"][f"{key['id']}/revoked"]["by"] = "a newer version"
    (tmp_path / "state.json").write_text(json.dumps(state))
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        gateway.use_key(key["secret"])
        assert gateway.chat().status_code == 401


def test_a_key_whose_record_is_damaged_at_run_time_is_rejected(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        gateway.use_key(gateway.create_key()["secret"])
        assert gateway.chat().status_code == 200
        state = json.loads((tmp_path / "state.json").read_text())
        for record in state["keys"].values():
            record["models"] = "demo"
        (tmp_path / "state.json").write_text(json.dumps(state))
        wait_until(lambda: gateway.chat().status_code == 401)


def test_a_revoked_key_is_rejected_immediately(shared_gateway: RunningGateway) -> None:
    created, other = shared_gateway.create_key(), shared_gateway.create_key()
    shared_gateway.use_key(created["secret"])
    assert shared_gateway.chat().status_code == 200
    revoked = shared_gateway.admin.delete(f"/admin/v1/keys/{created['id']}").json()
    assert revoked["state"] == "revoked"
    assert status_and_code(shared_gateway.chat()) == (401, "invalid_api_key")
    shared_gateway.use_key(other["secret"])
    assert shared_gateway.chat().status_code == 200
    repeated = shared_gateway.admin.delete(f"/admin/v1/keys/{created['id']}").json()
    assert repeated == revoked, "a second revocation changes no timestamp"


def test_f51_revoking_a_key_ends_its_running_streams(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    created, other = shared_gateway.create_key(), shared_gateway.create_key()
    module_worker.script = Script(hang_after=3)
    body = chat_body(stream=True)
    path = "/v1/chat/completions"
    with (
        shared_gateway.client.stream(
            "POST", path, json=body, headers=bearer_headers(created)
        ) as revoked_stream,
        shared_gateway.client.stream(
            "POST", path, json=body, headers=bearer_headers(other)
        ) as other_stream,
    ):
        revoked_chunks, other_chunks = revoked_stream.iter_raw(), other_stream.iter_raw()
        next(revoked_chunks)
        received = next(other_chunks)
        shared_gateway.admin.delete(f"/admin/v1/keys/{created['id']}")
        rest = b"".join(revoked_chunks)
        module_worker.resume.set()
        received += b"".join(other_chunks)
    assert b'"code":"key_revoked"' in rest
    assert b"[DONE]" not in rest
    assert received.endswith(DONE)


def test_revoking_a_key_ends_a_response_that_has_not_begun(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    created = shared_gateway.create_key()
    module_worker.script = Script(hang=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            shared_gateway.client.post,
            "/v1/chat/completions",
            json=chat_body(),
            headers=bearer_headers(created),
        )
        assert module_worker.request_received.wait(10)
        shared_gateway.admin.delete(f"/admin/v1/keys/{created['id']}")
        assert status_and_code(waiting.result(30)) == (401, "key_revoked")


@pytest.mark.parametrize("readable", [True, False])
def test_an_expired_key_is_rejected_and_its_stream_ends(
    tmp_path: Path, worker: ScriptedWorker, readable: bool
) -> None:
    """It expires also while the state file cannot be read."""
    wall = MovedClock(time.time)
    timing = replace(TIMING, wall=wall, refresh_s=0.05)
    with RunningGateway(make_settings(tmp_path), timing) as gateway:
        gateway.join(worker)
        expires_at = datetime.now(UTC) + timedelta(hours=1)
        created = gateway.create_key(expires_at=expires_at.isoformat())
        gateway.use_key(created["secret"])
        assert gateway.chat().status_code == 200
        worker.script = Script(hang_after=3)
        with gateway.stream() as response:
            chunks = response.iter_raw()
            received = next(chunks)
            if not readable:
                (tmp_path / "state.json").write_text("{")
            wall.advance(3600)
            received += b"".join(chunks)
        assert b'"code":"key_revoked"' in received
        assert status_and_code(gateway.chat()) == (401, "invalid_api_key")
        if readable:
            shown = gateway.admin.get(f"/admin/v1/keys/{created['id']}").json()
            assert shown["state"] == "expired"


def test_f50_a_key_revoked_at_one_gateway_is_rejected_by_another(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    """S12 (LiteLLM #35535, #9820): no gateway trusts a cached key after its revocation."""
    with (
        RunningGateway(make_settings(tmp_path)) as first,
        RunningGateway(make_settings(tmp_path)) as second,
    ):
        first.send_heartbeat(worker)
        created = second.create_key()
        first.use_key(created["secret"])
        wait_until(lambda: httpx.get(f"{first.url}/v1/models", timeout=60).status_code == 401)
        worker.script = Script(hang_after=3)
        with first.stream() as response:
            chunks = response.iter_raw()
            next(chunks)
            second.admin.delete(f"/admin/v1/keys/{created['id']}")
            rest = b"".join(chunks)
        assert b'"code":"key_revoked"' in rest
        assert status_and_code(first.chat()) == (401, "invalid_api_key")


def test_changing_a_revoked_key_does_not_reactivate_it(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    """CVE-2026-12795 and LiteLLM #9820: a concurrent update does not undo a revocation."""
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        created = gateway.create_key()
        path = f"/admin/v1/keys/{created['id']}"
        before = json.loads((tmp_path / "state.json").read_text())["keys"][created["id"]]
        gateway.admin.delete(path)
        # Another gateway that read the key earlier writes its whole record late.
        state = json.loads((tmp_path / "state.json").read_text())
        state["keys"][created["id"]] = {**before, "team": "late"}
        (tmp_path / "state.json").write_text(json.dumps(state))
        stored = gateway.admin.get(path).json()
        assert (stored["team"], stored["state"]) == ("late", "revoked")
        assert status_and_code(gateway.admin.patch(path, json={"team": "x"})) == (
            409,
            "key_is_revoked",
        )
        gateway.use_key(created["secret"])
        assert status_and_code(gateway.chat()) == (401, "invalid_api_key")


def warning_messages(body: dict[str, list[dict[str, str]]]) -> list[str]:
    return [warning["message"] for warning in body["warnings"]]


def test_a_policy_without_the_pools_of_a_key_is_applied_with_a_warning(
    gateway_with_worker: RunningGateway, admin: PolicyAdmin
) -> None:
    gateway_with_worker.create_key(name="everywhere")
    revoked = gateway_with_worker.create_key(name="revoked", pools=["text-mtp"])
    gateway_with_worker.admin.delete(f"/admin/v1/keys/{revoked['id']}")
    ann = gateway_with_worker.create_key(name="Ann", pools=["text-mtp"])
    bob = gateway_with_worker.create_key(name="Bob", pools=["text-mtp", "vlm"])
    expected = [
        f"the key {ann['id']} (Ann) names 'text-mtp', which the policy does not have; it could "
        "use no pool",
        f"the key {bob['id']} (Bob) names 'text-mtp', which the policy does not have; it could "
        "use only vlm",
    ]
    assert warning_messages(admin.post("/validate", single_pool_policy("vlm"))) == expected
    assert warning_messages(admin.post("/diff", single_pool_policy("vlm"))) == expected
    applied = admin.put(single_pool_policy("vlm"))
    assert (applied.status_code, warning_messages(applied.json())) == (200, expected)
    rollback = admin.edit("POST", {"version": 1}, "/rollback")
    assert (rollback.status_code, warning_messages(rollback.json())) == (200, [])


@pytest.mark.parametrize("change", ["an admin", "the file", "the file at a start"])
def test_each_policy_change_logs_a_warning_about_keys_without_a_pool(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: str,
) -> None:
    monkeypatch.setattr("gateway.assembly._POLICY_FILE_CHECK_S", 0.05)
    file = tmp_path / "policy.yaml"
    file.write_text(to_yaml(single_pool_policy("a")))
    settings = make_settings(tmp_path, policy=file)

    def warnings() -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.levelno >= logging.WARNING and record.name.startswith("gateway.config")
        ]

    with RunningGateway(settings) as gateway, PolicyAdmin(gateway.url, gateway.admin_key) as admin:
        gateway.create_key(name="Ann", pools=["a"])
        assert not warnings()
        if change == "an admin":
            admin.put(single_pool_policy("b"))
        elif change == "the file":
            file.write_text(to_yaml(single_pool_policy("b")))
            wait_until(lambda: bool(warnings()))
    if change == "the file at a start":
        file.write_text(to_yaml(single_pool_policy("b")))
        with RunningGateway(settings):
            pass
    (warning,) = warnings()
    assert warning.startswith("policy.warning version=2 message=the key key-")
    assert "(Ann) names 'a', which the policy does not have" in warning


def test_after_a_pool_is_renamed_a_patched_key_uses_the_new_name(
    gateway_with_worker: RunningGateway, admin: PolicyAdmin
) -> None:
    ann = gateway_with_worker.create_key(name="Ann", pools=["vlm"])
    gateway_with_worker.use_key(ann["secret"])
    assert len(admin.put(single_pool_policy("all")).json()["warnings"]) == 1
    assert gateway_with_worker.chat().json()["error"]["code"] == "pool_not_allowed"
    patched = gateway_with_worker.admin.patch(
        f"/admin/v1/keys/{ann['id']}", json={"pools": ["all"]}
    )
    assert patched.status_code == 200
    assert gateway_with_worker.chat().headers["x-paceline-pool"] == "all"


def test_the_policy_command_prints_the_warning(
    gateway_with_worker: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway_with_worker.create_key(name="Ann", pools=["text-mtp"])
    file = tmp_path / "policy.yaml"
    file.write_text(to_yaml(single_pool_policy("vlm")))
    for command in (["validate"], ["diff"], ["apply", "--note", "x"]):
        assert main(["policy", *command, str(file), "--url", gateway_with_worker.url]) == 0
        assert "(Ann) names 'text-mtp', which the policy does not have" in capsys.readouterr().out
