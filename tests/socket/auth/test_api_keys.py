"""Keys are made once, shown once, kept as digests, and changed while it runs.

A key that is revoked or expires ends its running answers too.

A policy that lacks a pool which keys name: it is told of, and not refused.
"""

from __future__ import annotations

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.cli import main
from gateway.errors import StartupError
from gateway.server import serve
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


def test_a_key_is_shown_once_and_its_secret_is_kept_nowhere(
    gateway_with_worker: RunningGateway, tmp_path: Path
) -> None:
    made = gateway_with_worker.create_key(name="Ann", team="lab")
    assert re.fullmatch(r"pk-[A-Za-z0-9_-]{43}", made["secret"])
    assert made["secret"].startswith(made["prefix"])
    assert made["state"] == "active"
    shown = gateway_with_worker.admin.get("/admin/v1/keys").json()["keys"]
    assert shown == [{name: value for name, value in made.items() if name != "secret"}]
    assert gateway_with_worker.admin.get(f"/admin/v1/keys/{made['id']}").json() == shown[0]
    assert "digest" not in shown[0]
    kept = (tmp_path / "state.json").read_text()
    assert made["id"] in kept
    assert made["secret"] not in kept


def test_the_answer_with_a_secret_may_be_stored_by_nobody(
    gateway_with_worker: RunningGateway,
) -> None:
    response = gateway_with_worker.admin.post("/admin/v1/keys", json={"name": "Ann"})
    assert response.headers["cache-control"] == "no-store"


def test_a_key_opens_the_data_plane_and_survives_a_restart(
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


def test_with_the_first_key_nobody_is_served_without_one(
    gateway_with_worker: RunningGateway,
) -> None:
    assert gateway_with_worker.chat().status_code == 200
    made = gateway_with_worker.create_key()
    assert status_and_code(gateway_with_worker.chat()) == (401, "invalid_api_key")
    gateway_with_worker.admin.delete(f"/admin/v1/keys/{made['id']}")
    assert status_and_code(gateway_with_worker.chat()) == (401, "invalid_api_key"), (
        "no way back to nobody needing one"
    )


def test_a_lost_state_opens_nothing(gateway_with_worker: RunningGateway, tmp_path: Path) -> None:
    made = gateway_with_worker.create_key()
    (tmp_path / "state.json").unlink()
    wait_until(
        lambda: (
            gateway_with_worker.client.get("/v1/models", headers=bearer_headers(made)).status_code
            == 401
        )
    )
    assert status_and_code(gateway_with_worker.chat()) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("terms", "param", "word"),
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
def test_wrong_terms_are_named_and_make_no_key(
    gateway: RunningGateway, terms: dict[str, Any], param: str, word: str
) -> None:
    """CVE-2026-47102: what a caller may set is a list of fields, and no other is looked at."""
    response = gateway.admin.post("/admin/v1/keys", json=terms)
    assert status_and_code(response) == (400, "invalid_value")
    assert response.json()["error"]["param"] == param
    assert word in response.json()["error"]["message"]
    assert gateway.admin.get("/admin/v1/keys").json() == {"keys": []}


def test_every_wrong_field_is_named(gateway: RunningGateway) -> None:
    response = gateway.admin.post("/admin/v1/keys", json={"team": "-", "tokens_a_day": -1})
    for field in ("name", "team", "tokens_a_day"):
        assert f"{field}: " in response.json()["error"]["message"]


def test_terms_are_changed_while_it_runs_and_null_takes_a_limit_away(
    gateway_with_worker: RunningGateway,
) -> None:
    made = gateway_with_worker.create_key(requests_a_minute=1)
    gateway_with_worker.use_key(made["secret"])
    assert gateway_with_worker.chat().status_code == 200
    assert status_and_code(gateway_with_worker.chat()) == (429, "requests_a_minute_exceeded")
    path = f"/admin/v1/keys/{made['id']}"
    changed = gateway_with_worker.admin.patch(
        path, json={"requests_a_minute": None, "team": "lab"}
    ).json()
    assert (changed["requests_a_minute"], changed["team"]) == (None, "lab")
    response = gateway_with_worker.chat()
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


def test_a_change_keeps_what_was_used(gateway_with_worker: RunningGateway) -> None:
    made = gateway_with_worker.create_key(requests_a_minute=5)
    gateway_with_worker.use_key(made["secret"])
    for _ in range(3):
        assert gateway_with_worker.chat().status_code == 200
    gateway_with_worker.admin.patch(f"/admin/v1/keys/{made['id']}", json={"requests_a_minute": 2})
    assert gateway_with_worker.chat().headers["x-ratelimit-remaining-requests"] == "1"


def test_there_is_no_way_to_a_key_that_was_never_made(gateway: RunningGateway) -> None:
    path = "/admin/v1/keys/key-000000000000"
    for response in (
        gateway.admin.get(path),
        gateway.admin.delete(path),
        gateway.admin.patch(path, json={}),
    ):
        assert status_and_code(response) == (404, "key_not_found")


async def test_one_secret_serves_one_purpose(tmp_path: Path) -> None:
    """CVE-2026-114612: a secret that is used twice opens what it was not made for."""
    same = SecretStr("the-same")
    settings = make_settings(tmp_path, api_key=same, admin_key=same)
    with pytest.raises(
        StartupError, match="PACELINE_API_KEY and PACELINE_ADMIN_KEY have the same value"
    ):
        await serve(settings, shutdown=Shutdown())


@pytest.mark.parametrize("name", ["api_key", "admin_key", "join_token"])
async def test_a_secret_that_no_header_can_hold_stops_the_start_and_is_not_repeated(
    tmp_path: Path, name: str
) -> None:
    wrong = {name: SecretStr("a-secret\n")}
    settings = make_settings(tmp_path).model_copy(update=wrong)
    with pytest.raises(StartupError, match=f"PACELINE_{name.upper()} contains") as refused:
        await serve(settings, shutdown=Shutdown())
    assert "a-secret" not in str(refused.value)


async def test_a_made_key_lets_it_listen_beyond_loopback(tmp_path: Path) -> None:
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.create_key()
    settings = make_settings(tmp_path).model_copy(update={"host": "0.0.0.0"})
    shutdown = Shutdown()
    told: list[str] = []

    def started(address: str) -> None:
        told.append(address)
        shutdown.request()

    await serve(
        settings, shutdown=shutdown, started=started, unkeyed=lambda: told.append("unkeyed")
    )
    assert len(told) == 1
    assert told[0].startswith("http://0.0.0.0:")


async def test_without_a_key_it_says_so_at_the_start(tmp_path: Path) -> None:
    shutdown = Shutdown()
    told: list[str] = []

    def started(address: str) -> None:
        told.append("started")
        shutdown.request()

    settings = make_settings(tmp_path)
    await serve(
        settings, shutdown=shutdown, started=started, unkeyed=lambda: told.append("unkeyed")
    )
    assert told == ["unkeyed", "started"]


@pytest.fixture
def corrupt_key_id(tmp_path: Path) -> str:
    """A state whose one key nobody can read; its id."""
    with RunningGateway(make_settings(tmp_path)) as gateway:
        made = gateway.create_key()
    state = json.loads((tmp_path / "state.json").read_text())
    state["keys"][made["id"]]["priorty"] = "bulk"
    (tmp_path / "state.json").write_text(json.dumps(state))
    return str(made["id"])


async def test_a_key_that_cannot_be_understood_stops_the_start_by_name(
    corrupt_key_id: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=f"key {corrupt_key_id} is damaged"):
        await serve(make_settings(tmp_path), shutdown=Shutdown())


def test_a_key_that_is_damaged_while_it_runs_opens_nothing(
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


def test_a_revoked_key_stops_at_once(gateway_with_worker: RunningGateway) -> None:
    made, other = gateway_with_worker.create_key(), gateway_with_worker.create_key()
    gateway_with_worker.use_key(made["secret"])
    assert gateway_with_worker.chat().status_code == 200
    revoked = gateway_with_worker.admin.delete(f"/admin/v1/keys/{made['id']}").json()
    assert revoked["state"] == "revoked"
    assert status_and_code(gateway_with_worker.chat()) == (401, "invalid_api_key")
    gateway_with_worker.use_key(other["secret"])
    assert gateway_with_worker.chat().status_code == 200
    again = gateway_with_worker.admin.delete(f"/admin/v1/keys/{made['id']}").json()
    assert again == revoked, "it was revoked when it was revoked"


def test_f51_a_revoked_key_stops_a_running_stream(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    made, other = gateway_with_worker.create_key(), gateway_with_worker.create_key()
    worker.script = Script(hang_after=3)
    body = chat_body(stream=True)
    path = "/v1/chat/completions"
    with (
        gateway_with_worker.client.stream(
            "POST", path, json=body, headers=bearer_headers(made)
        ) as ended,
        gateway_with_worker.client.stream(
            "POST", path, json=body, headers=bearer_headers(other)
        ) as going,
    ):
        of_ended, of_going = ended.iter_raw(), going.iter_raw()
        next(of_ended)
        received = next(of_going)
        gateway_with_worker.admin.delete(f"/admin/v1/keys/{made['id']}")
        rest = b"".join(of_ended)
        worker.resume.set()
        received += b"".join(of_going)
    assert b'"code":"key_revoked"' in rest
    assert b"[DONE]" not in rest
    assert received.endswith(DONE)


def test_a_revoked_key_ends_an_answer_that_has_not_begun(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    made = gateway_with_worker.create_key()
    worker.script = Script(hang=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            gateway_with_worker.client.post,
            "/v1/chat/completions",
            json=chat_body(),
            headers=bearer_headers(made),
        )
        assert worker.request_received.wait(10)
        gateway_with_worker.admin.delete(f"/admin/v1/keys/{made['id']}")
        assert status_and_code(waiting.result(30)) == (401, "key_revoked")


def test_an_expired_key_stops_and_so_does_its_stream(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1.5)
    made = gateway_with_worker.create_key(expires_at=soon.isoformat())
    gateway_with_worker.use_key(made["secret"])
    worker.script = Script(hang_after=3)
    with gateway_with_worker.stream() as response:
        received = b"".join(response.iter_raw())
    assert b'"code":"key_revoked"' in received
    assert status_and_code(gateway_with_worker.chat()) == (401, "invalid_api_key")
    assert (
        gateway_with_worker.admin.get(f"/admin/v1/keys/{made['id']}").json()["state"] == "expired"
    )


def test_a_key_expires_also_while_the_state_cannot_be_read(
    gateway_with_worker: RunningGateway, tmp_path: Path
) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1.5)
    gateway_with_worker.use_key(
        gateway_with_worker.create_key(expires_at=soon.isoformat())["secret"]
    )
    assert gateway_with_worker.chat().status_code == 200
    (tmp_path / "state.json").write_text("{")
    wait_until(lambda: gateway_with_worker.chat().status_code == 401)


def test_f50_a_key_that_another_gateway_revokes_stops_here_too(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    """S12 (LiteLLM #35535, #9820): no process goes on with what it remembers of a key."""
    with (
        RunningGateway(make_settings(tmp_path)) as here,
        RunningGateway(make_settings(tmp_path)) as there,
    ):
        here.send_heartbeat(worker)
        made = there.create_key()
        here.use_key(made["secret"])
        wait_until(lambda: httpx.get(f"{here.url}/v1/models").status_code == 401)
        worker.script = Script(hang_after=3)
        with here.stream() as response:
            pieces = response.iter_raw()
            next(pieces)
            there.admin.delete(f"/admin/v1/keys/{made['id']}")
            rest = b"".join(pieces)
        assert b'"code":"key_revoked"' in rest
        assert status_and_code(here.chat()) == (401, "invalid_api_key")


def test_whoever_changes_a_revoked_key_does_not_bring_it_back(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    """CVE-2026-12795 and LiteLLM #9820: an update and a revocation at the same moment."""
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        made = gateway.create_key()
        path = f"/admin/v1/keys/{made['id']}"
        before = json.loads((tmp_path / "state.json").read_text())["keys"][made["id"]]
        gateway.admin.delete(path)
        # As another gateway would that read the key before: the whole record, written late.
        state = json.loads((tmp_path / "state.json").read_text())
        state["keys"][made["id"]] = {**before, "team": "late"}
        (tmp_path / "state.json").write_text(json.dumps(state))
        late = gateway.admin.get(path).json()
        assert (late["team"], late["state"]) == ("late", "revoked")
        assert status_and_code(gateway.admin.patch(path, json={"team": "x"})) == (
            409,
            "key_is_revoked",
        )
        gateway.use_key(made["secret"])
        assert status_and_code(gateway.chat()) == (401, "invalid_api_key")


def sentences(told: dict[str, list[dict[str, str]]]) -> list[str]:
    return [warning["message"] for warning in told["warnings"]]


def test_a_policy_that_lacks_the_pools_of_a_key_is_applied_with_a_warning(
    gateway_with_worker: RunningGateway, admin: PolicyAdmin
) -> None:
    gateway_with_worker.create_key(name="everywhere")
    gone = gateway_with_worker.create_key(name="gone", pools=["text-mtp"])
    gateway_with_worker.admin.delete(f"/admin/v1/keys/{gone['id']}")
    ann = gateway_with_worker.create_key(name="Ann", pools=["text-mtp"])
    bob = gateway_with_worker.create_key(name="Bob", pools=["text-mtp", "vlm"])
    told = [
        f"the key {ann['id']} (Ann) names 'text-mtp', which the policy does not have; it could "
        "use no pool",
        f"the key {bob['id']} (Bob) names 'text-mtp', which the policy does not have; it could "
        "use only vlm",
    ]
    assert sentences(admin.post("/validate", single_pool_policy("vlm"))) == told
    assert sentences(admin.post("/diff", single_pool_policy("vlm"))) == told
    applied = admin.put(single_pool_policy("vlm"))
    assert (applied.status_code, sentences(applied.json())) == (200, told)
    back = admin.edit("POST", {"version": 1}, "/rollback")
    assert (back.status_code, sentences(back.json())) == (200, [])


@pytest.mark.parametrize("way", ["an admin", "the file", "the file at a start"])
def test_whoever_changes_the_policy_is_warned_aloud_of_keys_that_it_strands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    monkeypatch.setattr("gateway.assembly._POLICY_FILE_CHECK_S", 0.05)
    file = tmp_path / "policy.yaml"
    file.write_text(to_yaml(single_pool_policy("a")))
    settings = make_settings(tmp_path, policy=file)

    def warned() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]

    with RunningGateway(settings) as gateway, PolicyAdmin(gateway.url) as admin:
        gateway.create_key(name="Ann", pools=["a"])
        assert not warned()
        if way == "an admin":
            admin.put(single_pool_policy("b"))
        elif way == "the file":
            file.write_text(to_yaml(single_pool_policy("b")))
            wait_until(lambda: bool(warned()))
    if way == "the file at a start":
        file.write_text(to_yaml(single_pool_policy("b")))
        with RunningGateway(settings):
            pass
    (warning,) = warned()
    assert warning.startswith("policy.warning version=2 message=the key key-")
    assert "(Ann) names 'a', which the policy does not have" in warning


def test_a_pool_gets_another_name_and_its_keys_follow(
    gateway_with_worker: RunningGateway, admin: PolicyAdmin
) -> None:
    ann = gateway_with_worker.create_key(name="Ann", pools=["vlm"])
    gateway_with_worker.use_key(ann["secret"])
    assert len(admin.put(single_pool_policy("all")).json()["warnings"]) == 1
    assert gateway_with_worker.chat().json()["error"]["code"] == "pool_not_allowed"
    follows = gateway_with_worker.admin.patch(
        f"/admin/v1/keys/{ann['id']}", json={"pools": ["all"]}
    )
    assert follows.status_code == 200
    assert gateway_with_worker.chat().headers["x-paceline-pool"] == "all"


def test_the_command_warns_too(
    gateway_with_worker: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway_with_worker.create_key(name="Ann", pools=["text-mtp"])
    file = tmp_path / "mine.yaml"
    file.write_text(to_yaml(single_pool_policy("vlm")))
    for command in (["validate"], ["diff"], ["apply", "--note", "x"]):
        assert main(["policy", *command, str(file), "--url", gateway_with_worker.url]) == 0
        assert "(Ann) names 'text-mtp', which the policy does not have" in capsys.readouterr().out
