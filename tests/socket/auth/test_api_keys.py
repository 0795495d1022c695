"""API keys: creation, changes, expiry, revocation, and warnings about pools that they name."""

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.assembly import TIMING
from gateway.cli import main
from gateway.errors import StartupError
from gateway.server import serve
from paceline.lifecycle import Shutdown
from tests.support.fake_clock import MovedClock
from tests.support.log_capture import LogCapture, capture_logs
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    begun,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, Script, ScriptedWorker


def edit_keys(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the stored keys, as another gateway or a damaged disk does."""
    file = folder / "state.json"
    state = json.loads(file.read_text())
    edit(state["keys"])
    file.write_text(json.dumps(state))


def test_a_secret_is_returned_once_to_no_cache_and_stored_nowhere(gateway, tmp_path) -> None:
    response = gateway.admin.post("/admin/v1/keys", json={"name": "Ann", "team": "lab"})
    assert response.headers["cache-control"] == "no-store"
    created = response.json()
    secret = created.pop("secret")
    assert re.fullmatch(r"pk-[A-Za-z0-9_-]{43}", secret)
    assert secret.startswith(created["prefix"])
    assert created["state"] == "active"
    assert gateway.admin.get("/admin/v1/keys").json()["keys"] == [created]
    assert gateway.admin.get(f"/admin/v1/keys/{created['id']}").json() == created
    assert "digest" not in created
    state = (tmp_path / "state.json").read_text()
    assert created["id"] in state
    assert secret not in state


def test_after_the_first_key_every_request_requires_one_whatever_becomes_of_it(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    """Its revocation, a restart or the loss of the state file does not open the gateway again."""
    with RunningGateway(make_settings(tmp_path)) as first:
        first.join(worker)
        assert first.chat().status_code == 200
        revoked = first.create_key()
        assert status_and_code(first.chat()) == (401, "invalid_api_key")
        first.revoke_key(revoked)
        assert status_and_code(first.chat()) == (401, "invalid_api_key")
        key = bearer_headers(first.create_key())
    with RunningGateway(make_settings(tmp_path)) as second:
        second.join(worker)
        assert status_and_code(second.chat()) == (401, "invalid_api_key")
        assert second.chat(headers=key).status_code == 200
        assert second.client.get("/v1/models", headers=key).status_code == 200
        (tmp_path / "state.json").unlink()
        wait_until(lambda: second.client.get("/v1/models", headers=key).status_code == 401)
        assert status_and_code(second.chat()) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("terms", "param", "expected"),
    [
        ({"name": "a", "nmae": "b"}, "nmae", "unknown field"),
        ({"name": "=1+1"}, "name", "the first is a letter or digit"),
        ({"name": "a\nb"}, "name", "1 to 64 characters"),
        ({"name": "Émile"}, "name", r"letters \(A to Z, a to z\), digits, spaces and \. _ @ / -; "),
        ({"name": "a", "models": ["gpt-*"]}, "models.0", r"name of one model.* without '\*'"),
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
        ({"team": "-", "tokens_a_day": -1}, "tokens_a_day", "(?=.*name: )(?=.*team: )"),
        ({"name": "a", "id": "key-000000000000"}, "id", "unknown field"),
        ({"name": "a", "revoked_at": None, "digest": "0" * 64}, "revoked_at", "unknown field"),
    ],
)
def test_invalid_terms_are_named_and_create_no_key(module_gateway, terms, param, expected) -> None:
    """CVE-2026-47102: an admin sets listed fields only; the gateway rejects all other fields."""
    before = module_gateway.admin.get("/admin/v1/keys").json()
    response = module_gateway.admin.post("/admin/v1/keys", json=terms)
    assert status_and_code(response) == (400, "invalid_value")
    assert response.json()["error"]["param"] == param
    assert re.search(expected, response.json()["error"]["message"])
    assert module_gateway.admin.get("/admin/v1/keys").json() == before


def test_a_patch_changes_terms_at_run_time_and_null_removes_a_limit(shared_gateway) -> None:
    path = f"/admin/v1/keys/{shared_gateway.use_new_key(requests_a_minute=5)['id']}"
    assert [shared_gateway.chat().status_code for _ in range(3)] == [200] * 3
    shared_gateway.admin.patch(path, json={"requests_a_minute": 2})
    assert shared_gateway.chat().headers["x-ratelimit-remaining-requests"] == "1"
    assert shared_gateway.chat().status_code == 200
    assert status_and_code(shared_gateway.chat()) == (429, "requests_a_minute_exceeded")
    terms = {"requests_a_minute": None, "team": "lab"}
    changed = shared_gateway.admin.patch(path, json=terms).json()
    assert changed.items() >= terms.items()
    response = shared_gateway.chat()
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(
    ("secrets", "problem"),
    [
        (
            {"api_key": "a-secret", "admin_key": "a-secret"},
            "PACELINE_API_KEY and PACELINE_ADMIN_KEY have the same value",
        ),
        ({"api_key": "a-secret\n"}, "PACELINE_API_KEY begins or ends with white space"),
        ({"admin_key": " a-secret"}, "PACELINE_ADMIN_KEY begins or ends with white space"),
        ({"join_token": "a\nsecret"}, "PACELINE_JOIN_TOKEN contains"),
    ],
)
async def test_equal_secrets_and_those_that_no_header_carries_fail_the_start_and_are_not_printed(
    tmp_path: Path, secrets: dict[str, str], problem: str
) -> None:
    """CVE-2026-114612: a shared secret would authorize data clients as admins."""
    update = {name: SecretStr(secret) for name, secret in secrets.items()}
    with pytest.raises(StartupError, match=problem) as error:
        await serve(make_settings(tmp_path).model_copy(update=update), shutdown=Shutdown())
    assert "a-secret" not in str(error.value)


def test_c15_a_key_whose_record_or_revocation_is_damaged_is_rejected_and_stops_no_start(
    tmp_path: Path, worker: ScriptedWorker, log_capture: LogCapture
) -> None:
    with RunningGateway(make_settings(tmp_path)) as gateway:
        damaged, revoked = gateway.create_key(), gateway.create_key()
        gateway.revoke_key(revoked)
    edit_keys(tmp_path, lambda keys: keys[damaged["id"]].update(priorty="bulk"))
    newer = {"by": "a newer version"}
    edit_keys(tmp_path, lambda keys: keys[f"{revoked['id']}/revoked"].update(newer))
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.join(worker)
        for headers in ({}, bearer_headers(damaged), bearer_headers(revoked)):
            assert gateway.chat(headers=headers).status_code == 401
        created = gateway.use_new_key()
        assert gateway.chat().status_code == 200
        edit_keys(tmp_path, lambda keys: keys[created["id"]].update(models="demo"))
        wait_until(lambda: gateway.chat().status_code == 401)
    message = f"record.skipped kind=keys name='{damaged['id']}' why=priorty: unknown field"
    assert log_capture.texts.count(message) == 1


def test_f51_a_revoked_key_is_rejected_immediately_and_its_running_streams_end(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    created = shared_gateway.use_new_key()
    other = bearer_headers(shared_gateway.create_key())
    module_worker.script = Script(hang_after=3)
    with (
        begun(shared_gateway.stream()) as read,
        begun(shared_gateway.stream(headers=other)) as rest,
    ):
        revoked = shared_gateway.revoke_key(created)
        received = read()
        assert b'"code":"key_revoked"' in received
        assert DONE not in received
        module_worker.resume.set()
        assert rest().endswith(DONE)
    assert status_and_code(shared_gateway.chat()) == (401, "invalid_api_key")
    assert shared_gateway.chat(headers=other).status_code == 200
    assert revoked["state"] == "revoked"
    again = shared_gateway.revoke_key(created)
    assert again["revoked_at"] == revoked["revoked_at"], "a second one changes no timestamp"


def test_revoking_a_key_ends_a_response_that_has_not_begun(shared_gateway, module_worker) -> None:
    created = shared_gateway.use_new_key()
    module_worker.script = Script(hang=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(shared_gateway.chat)
        assert module_worker.request_received.wait(60)
        shared_gateway.revoke_key(created)
        assert status_and_code(waiting.result(30)) == (401, "key_revoked")


@pytest.mark.parametrize("readable", [True, False])
def test_an_expired_key_is_rejected_and_its_stream_ends(tmp_path, worker, readable) -> None:
    """It expires also while the state file cannot be read."""
    wall = MovedClock(time.time)
    timing = replace(TIMING, wall=wall, refresh_s=0.05)
    with RunningGateway(make_settings(tmp_path), timing) as gateway:
        gateway.join(worker)
        expires_at = datetime.now(UTC) + timedelta(hours=1)
        created = gateway.use_new_key(expires_at=expires_at.isoformat())
        assert gateway.chat().status_code == 200
        worker.script = Script(hang_after=3)
        with begun(gateway.stream()) as read:
            if not readable:
                (tmp_path / "state.json").write_text("{")
            wall.advance(3600)
            assert b'"code":"key_revoked"' in read()
        assert status_and_code(gateway.chat()) == (401, "invalid_api_key")
        if readable:
            shown = gateway.admin.get(f"/admin/v1/keys/{created['id']}").json()
            assert shown["state"] == "expired"
            told = f"This API key expired on {expires_at:%Y-%m-%d %H:%M} UTC. Ask the admin"
            assert gateway.chat().json()["error"]["message"].startswith(told)


def test_the_use_of_an_ended_secret_is_told_to_its_holder_and_to_admins(
    gateway_with_worker: RunningGateway,
) -> None:
    """Its holder learns how it ended; an admin sees key, address and count, as one row."""
    gateway = gateway_with_worker
    leaked, replaced = gateway.create_key(name="Ann"), gateway.create_key(name="Bob")
    gateway.revoke_key(leaked)
    rotated = gateway.admin.post(f"/admin/v1/keys/{replaced['id']}/rotate").json()
    with capture_logs() as logs:
        for key, how in ((leaked, "revoked"), (replaced, "replaced")):
            headers = bearer_headers(key) | {"x-forwarded-for": "203.0.113.9"}
            claim = {**headers, "x-forwarded-for": f"fe80::1%{'x' * 400}"}
            refused = [gateway.chat(headers=headers) for _ in range(3)]
            refused += [gateway.chat(headers=claim)]
            refused += [gateway.client.get("/v1/models", headers=headers)]
            anthropic = {"x-api-key": key["secret"], "anthropic-version": "2023-06-01"}
            message = gateway.client.post("/v1/messages", json={}, headers=anthropic)
            for response in (*refused, message):
                text = response.json()["error"]["message"]
                assert response.status_code == 401
                assert re.match(rf"This API key was {how} on 20\d\d-.* UTC\. Ask the admin", text)
    rows = gateway.admin.get("/admin/v1/errors").json()["errors"]
    through = "203.0.113.9 through 127.0.0.1"
    named = [(row["key_name"], row["code"], row["count"], row["address"]) for row in rows]
    assert sorted(named) == sorted(
        (name, "ended_api_key", count, address)
        for name in ("Ann", "Bob")
        for count, address in ((4, through), (2, "127.0.0.1"))
    )
    shown = {key["name"]: key for key in gateway.admin.get("/admin/v1/keys").json()["keys"]}
    assert all((key["refused"], key["refused_from"]) == (6, "127.0.0.1") for key in shown.values())
    lines = [text for text in logs.texts if text.startswith("key.ended_in_use")]
    assert sorted(line.split()[1] for line in lines) == sorted(
        f"key={key['id']}" for key in (leaked, replaced)
    )
    assert leaked["secret"] not in str(logs.texts)
    assert gateway.chat(headers=bearer_headers(rotated)).status_code == 200
    assert (
        gateway.chat(headers=bearer_headers({"secret": "pk-x"}))
        .json()["error"]["message"]
        .startswith("A valid API key is required")
    )


def test_a_rotated_key_keeps_its_id_and_terms_whatever_a_late_gateway_writes(
    tmp_path, worker
) -> None:
    with RunningGateway(make_settings(tmp_path)) as gateway:
        created = gateway.create_key(name="Ann", team="lab", requests_a_minute=50)
        path = f"/admin/v1/keys/{created['id']}"
        before = json.loads((tmp_path / "state.json").read_text())["keys"][created["id"]]
        second, third = (gateway.admin.post(f"{path}/rotate").json() for _ in range(2))
        same = ("id", "name", "team", "requests_a_minute", "created_at", "state")
        assert all(third[name] == created[name] for name in same)
        assert gateway.admin.post("/admin/v1/keys/key-0/rotate").status_code == 404
        stored = json.loads((tmp_path / "state.json").read_text())["keys"]
        damaged = {name: {"x": 1} for name in stored if "/" in name}
        edit_keys(tmp_path, lambda keys: keys.update(damaged))
        gateway.use_key(third["secret"])
        wait_until(lambda: gateway.client.get("/v1/models").status_code == 401)
        old = gateway.client.get("/v1/models", headers=bearer_headers(created))
        assert old.status_code == 401, "a damaged rotation revives no old secret"
        # Another gateway that read the key earlier writes its whole record late.
        stored[created["id"]] = {**before, "team": "late"}
        edit_keys(tmp_path, lambda keys: keys.update(stored))
    with RunningGateway(make_settings(tmp_path)) as again:
        again.join(worker)
        statuses = [
            again.chat(headers=bearer_headers(key)).status_code for key in (created, second, third)
        ]
        assert statuses == [401, 401, 200]
        changed = again.admin.patch(path, json={"team": "x"}).json()
        assert (changed["team"], changed["prefix"]) == ("x", third["prefix"])
        again.revoke_key(third)
        assert status_and_code(again.admin.post(f"{path}/rotate")) == (409, "key_is_revoked")
        assert "revoked" in again.chat(headers=bearer_headers(third)).text


def test_no_two_active_keys_have_one_name(module_gateway: RunningGateway) -> None:
    first, other = module_gateway.create_key(name="Zoe"), module_gateway.create_key(name="Eva")
    ended = module_gateway.create_key(name="Ida")
    module_gateway.revoke_key(ended)
    keys = "/admin/v1/keys"
    for refused in (
        module_gateway.admin.post(keys, json={"name": "zoe"}),
        module_gateway.admin.patch(f"{keys}/{other['id']}", json={"name": "Zoe"}),
    ):
        assert status_and_code(refused) == (400, "invalid_value")
        assert refused.json()["error"]["param"] == "name"
        assert first["id"] in refused.json()["error"]["message"]
    assert module_gateway.admin.post(keys, json={"name": "Ida"}).status_code == 201
    unchanged = module_gateway.admin.patch(f"{keys}/{first['id']}", json={"name": "Zoe"})
    assert unchanged.status_code == 200


def test_terms_that_have_no_effect_now_are_warned_of(gateway_with_worker: RunningGateway) -> None:
    created = gateway_with_worker.create_key(models=["demo", "gone"])
    assert created["warnings"] == ["No worker serves the model 'gone' now."]


def test_f50_a_key_revoked_at_one_gateway_is_rejected_by_another(tmp_path, worker) -> None:
    """S12 (LiteLLM #35535, #9820): no gateway trusts a cached key after its revocation."""
    settings = make_settings(tmp_path)
    with RunningGateway(settings) as first, RunningGateway(settings) as second:
        first.join(worker)
        created = second.create_key()
        wait_until(lambda: first.client.get("/v1/models").status_code == 401)
        first.use_key(created["secret"])
        worker.script = Script(hang_after=3)
        with begun(first.stream()) as read:
            second.revoke_key(created)
            assert b'"code":"key_revoked"' in read()
        assert status_and_code(first.chat()) == (401, "invalid_api_key")


def test_changing_a_revoked_key_does_not_reactivate_it(gateway, tmp_path) -> None:
    """CVE-2026-12795 and LiteLLM #9820: a concurrent update does not undo a revocation."""
    created = gateway.use_new_key()
    path = f"/admin/v1/keys/{created['id']}"
    before = json.loads((tmp_path / "state.json").read_text())["keys"][created["id"]]
    gateway.revoke_key(created)
    # Another gateway that read the key earlier writes its whole record late.
    late = {created["id"]: {**before, "team": "late"}}
    edit_keys(tmp_path, lambda keys: keys.update(late))
    stored = gateway.admin.get(path).json()
    assert (stored["team"], stored["state"]) == ("late", "revoked")
    patched = gateway.admin.patch(path, json={"team": "x"})
    assert status_and_code(patched) == (409, "key_is_revoked")
    assert status_and_code(gateway.chat()) == (401, "invalid_api_key")


def warning_messages(body: dict[str, list[dict[str, str]]]) -> list[str]:
    return [warning["message"] for warning in body["warnings"]]


def test_a_policy_without_the_pools_of_a_key_is_applied_with_a_warning(
    gateway_with_worker, admin, tmp_path, capsys
) -> None:
    """An admin sees it in each answer and each command, and patches the key."""
    gateway = gateway_with_worker
    gateway.create_key(name="everywhere")
    gateway.revoke_key(gateway.create_key(name="revoked", pools=["text-mtp"]))
    ann = gateway.use_new_key(name="Ann", pools=["text-mtp"])
    bob = gateway.create_key(name="Bob", pools=["text-mtp", "vlm"])
    lacking = "names 'text-mtp', which the policy does not have; it could use"
    expected = [
        f"the key {ann['id']} (Ann) {lacking} no pool",
        f"the key {bob['id']} (Bob) {lacking} only vlm",
    ]
    assert warning_messages(admin.post("/validate", single_pool_policy("vlm"))) == expected
    assert warning_messages(admin.post("/diff", single_pool_policy("vlm"))) == expected
    applied = admin.put(single_pool_policy("vlm"))
    assert (applied.status_code, warning_messages(applied.json())) == (200, expected)
    assert status_and_code(gateway.chat()) == (403, "pool_not_allowed")
    path = f"/admin/v1/keys/{ann['id']}"
    assert gateway.admin.patch(path, json={"pools": ["vlm"]}).status_code == 200
    assert gateway.chat().headers["x-paceline-pool"] == "vlm"
    rollback = admin.edit("POST", {"version": 1}, "/rollback")
    assert (rollback.status_code, warning_messages(rollback.json())) == (200, [])
    file = tmp_path / "policy.yaml"
    file.write_text(to_yaml(single_pool_policy("vlm")))
    for command in (["validate"], ["diff"], ["apply", "--note", "x"]):
        assert main(["policy", *command, str(file), "--url", gateway.url]) == 0
        assert "(Bob) names 'text-mtp', which the policy does not have" in capsys.readouterr().out


def test_each_policy_change_logs_a_warning_about_keys_without_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An admin changes it, its file does, and the file is another one at the next start."""
    monkeypatch.setattr("gateway.assembly._POLICY_FILE_CHECK_S", 0.05)
    file = tmp_path / "policy.yaml"
    file.write_text(to_yaml(single_pool_policy("a")))
    settings = make_settings(tmp_path, policy=file)

    def warnings() -> list[str]:
        return [text for text in caplog.messages if text.startswith("policy.warning")]

    with RunningGateway(settings) as gateway, PolicyAdmin(gateway.url, gateway.admin_key) as admin:
        gateway.create_key(name="Ann", pools=["a"])
        assert not warnings()
        admin.put(single_pool_policy("b"))
        assert len(warnings()) == 1
        file.write_text(to_yaml(single_pool_policy("c")))
        wait_until(lambda: len(warnings()) == 2)
    file.write_text(to_yaml(single_pool_policy("d")))
    with RunningGateway(settings):
        pass
    assert len(warnings()) == 3
    for version, warning in enumerate(warnings(), start=2):
        assert warning.startswith(f"policy.warning version={version} message=the key key-")
        assert "(Ann) names 'a', which the policy does not have" in warning
