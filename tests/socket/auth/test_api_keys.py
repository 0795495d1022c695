"""Keys are made once, shown once, kept as digests, and changed while it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.errors import StartRefused
from gateway.server import Ending, serve
from tests.support.running_gateway import Gateway, bearing, error_of, eventually, settings_for_tests
from tests.support.scripted_worker import FakeWorker


def test_a_key_is_shown_once_and_its_secret_is_kept_nowhere(line: Gateway, tmp_path: Path) -> None:
    made = line.make_key(name="Ann", team="lab")
    assert re.fullmatch(r"pk-[A-Za-z0-9_-]{43}", made["secret"])
    assert made["secret"].startswith(made["prefix"])
    assert made["state"] == "active"
    shown = line.admin.get("/admin/v1/keys").json()["keys"]
    assert shown == [{name: value for name, value in made.items() if name != "secret"}]
    assert line.admin.get(f"/admin/v1/keys/{made['id']}").json() == shown[0]
    assert "digest" not in shown[0]
    kept = (tmp_path / "state.json").read_text()
    assert made["id"] in kept
    assert made["secret"] not in kept


def test_the_answer_with_a_secret_may_be_stored_by_nobody(line: Gateway) -> None:
    answer = line.admin.post("/admin/v1/keys", json={"name": "Ann"})
    assert answer.headers["cache-control"] == "no-store"


def test_a_key_opens_the_data_plane_and_survives_a_restart(
    tmp_path: Path, worker: FakeWorker
) -> None:
    with Gateway(settings_for_tests(tmp_path)) as first:
        secret = first.make_key()["secret"]
    with Gateway(settings_for_tests(tmp_path)) as second:
        second.join(worker)
        assert error_of(second.chat()) == (401, "invalid_api_key")
        second.bear(secret)
        assert second.chat().status_code == 200
        assert second.client.get("/v1/models").status_code == 200


def test_with_the_first_key_nobody_is_served_without_one(line: Gateway) -> None:
    assert line.chat().status_code == 200
    made = line.make_key()
    assert error_of(line.chat()) == (401, "invalid_api_key")
    line.admin.delete(f"/admin/v1/keys/{made['id']}")
    assert error_of(line.chat()) == (401, "invalid_api_key"), "no way back to nobody needing one"


def test_a_lost_state_opens_nothing(line: Gateway, tmp_path: Path) -> None:
    made = line.make_key()
    (tmp_path / "state.json").unlink()
    eventually(lambda: line.client.get("/v1/models", headers=bearing(made)).status_code == 401)
    assert error_of(line.chat()) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("terms", "param", "word"),
    [
        ({"name": "a", "nmae": "b"}, "nmae", "no such field"),
        ({"name": "=1+1"}, "name", "must match"),
        ({"name": "a\nb"}, "name", "must match"),
        ({}, "name", "is missing"),
        ({"name": "a", "nmae": None}, "nmae", "no such field"),
        ({"name": "a", "requests_a_minute": 0}, "requests_a_minute", "at least 1"),
        ({"name": "a", "requests_a_minute": True}, "requests_a_minute", "whole number"),
        ({"name": "a", "tokens_a_day": "9"}, "tokens_a_day", "whole number"),
        ({"name": "a", "models": ["gpt-4o-mini"]}, "models.0", "alias"),
        ({"name": "a", "pools": ["vlm", "vml"]}, "pools.1", "no pool"),
        ({"name": "a", "priority": "urgent"}, "priority", "interactive"),
        ({"name": "a", "expires_at": "2020-01-01T00:00:00Z"}, "expires_at", "over"),
        ({"name": "a", "expires_at": "2099-01-01T00:00:00"}, "expires_at", "timezone"),
        ({"name": "a", "id": "key-000000000000"}, "id", "no such field"),
        ({"name": "a", "revoked_at": None, "digest": "0" * 64}, "revoked_at", "no such field"),
    ],
)
def test_wrong_terms_are_named_and_make_no_key(
    gateway: Gateway, terms: dict[str, Any], param: str, word: str
) -> None:
    """CVE-2026-47102: what a caller may set is a list of fields, and no other is looked at."""
    answer = gateway.admin.post("/admin/v1/keys", json=terms)
    assert error_of(answer) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == param
    assert word in answer.json()["error"]["message"]
    assert gateway.admin.get("/admin/v1/keys").json() == {"keys": []}


def test_every_wrong_field_is_named(gateway: Gateway) -> None:
    answer = gateway.admin.post("/admin/v1/keys", json={"team": "-", "tokens_a_day": -1})
    for field in ("name", "team", "tokens_a_day"):
        assert f"{field}: " in answer.json()["error"]["message"]


def test_terms_are_changed_while_it_runs_and_null_takes_a_limit_away(line: Gateway) -> None:
    made = line.make_key(requests_a_minute=1)
    line.bear(made["secret"])
    assert line.chat().status_code == 200
    assert error_of(line.chat()) == (429, "requests_a_minute_exceeded")
    path = f"/admin/v1/keys/{made['id']}"
    changed = line.admin.patch(path, json={"requests_a_minute": None, "team": "lab"}).json()
    assert (changed["requests_a_minute"], changed["team"]) == (None, "lab")
    answer = line.chat()
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_a_change_keeps_what_was_used(line: Gateway) -> None:
    made = line.make_key(requests_a_minute=5)
    line.bear(made["secret"])
    for _ in range(3):
        assert line.chat().status_code == 200
    line.admin.patch(f"/admin/v1/keys/{made['id']}", json={"requests_a_minute": 2})
    assert line.chat().headers["x-ratelimit-remaining-requests"] == "1"


def test_there_is_no_way_to_a_key_that_was_never_made(gateway: Gateway) -> None:
    path = "/admin/v1/keys/key-000000000000"
    for answer in (
        gateway.admin.get(path),
        gateway.admin.delete(path),
        gateway.admin.patch(path, json={}),
    ):
        assert error_of(answer) == (404, "key_not_found")


async def test_one_secret_serves_one_purpose(tmp_path: Path) -> None:
    """CVE-2026-114612: a secret that is used twice opens what it was not made for."""
    same = SecretStr("the-same")
    settings = settings_for_tests(tmp_path, api_key=same, admin_key=same)
    with pytest.raises(StartRefused, match="PACELINE_API_KEY and PACELINE_ADMIN_KEY are the same"):
        await serve(settings, ending=Ending())


@pytest.mark.parametrize("name", ["api_key", "admin_key", "join_token"])
async def test_a_secret_that_no_header_can_hold_stops_the_start_and_is_not_repeated(
    tmp_path: Path, name: str
) -> None:
    wrong = {name: SecretStr("a-secret\n")}
    settings = settings_for_tests(tmp_path).model_copy(update=wrong)
    with pytest.raises(StartRefused, match=f"PACELINE_{name.upper()} holds what") as refused:
        await serve(settings, ending=Ending())
    assert "a-secret" not in str(refused.value)


async def test_a_made_key_lets_it_listen_beyond_loopback(tmp_path: Path) -> None:
    with Gateway(settings_for_tests(tmp_path)) as gateway:
        gateway.make_key()
    settings = settings_for_tests(tmp_path).model_copy(update={"host": "0.0.0.0"})
    ending = Ending()
    told: list[str] = []

    def started(address: str) -> None:
        told.append(address)
        ending.ask()

    await serve(settings, ending=ending, started=started, unkeyed=lambda: told.append("unkeyed"))
    assert len(told) == 1
    assert told[0].startswith("http://0.0.0.0:")


async def test_without_a_key_it_says_so_at_the_start(tmp_path: Path) -> None:
    ending = Ending()
    told: list[str] = []

    def started(address: str) -> None:
        told.append("started")
        ending.ask()

    settings = settings_for_tests(tmp_path)
    await serve(settings, ending=ending, started=started, unkeyed=lambda: told.append("unkeyed"))
    assert told == ["unkeyed", "started"]


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """A state whose one key nobody can read; its id."""
    with Gateway(settings_for_tests(tmp_path)) as gateway:
        made = gateway.make_key()
    state = json.loads((tmp_path / "state.json").read_text())
    state["keys"][made["id"]]["priorty"] = "bulk"
    (tmp_path / "state.json").write_text(json.dumps(state))
    return str(made["id"])


async def test_a_key_that_cannot_be_understood_stops_the_start_by_name(
    damaged: str, tmp_path: Path
) -> None:
    with pytest.raises(StartRefused, match=f"The key {damaged} "):
        await serve(settings_for_tests(tmp_path), ending=Ending())


def test_a_key_that_is_damaged_while_it_runs_opens_nothing(
    tmp_path: Path, worker: FakeWorker
) -> None:
    with Gateway(settings_for_tests(tmp_path)) as gateway:
        gateway.join(worker)
        gateway.bear(gateway.make_key()["secret"])
        assert gateway.chat().status_code == 200
        state = json.loads((tmp_path / "state.json").read_text())
        for record in state["keys"].values():
            record["models"] = "demo"
        (tmp_path / "state.json").write_text(json.dumps(state))
        eventually(lambda: gateway.chat().status_code == 401)
