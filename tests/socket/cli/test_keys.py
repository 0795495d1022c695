"""`paceline keys` as a user runs it, against a real gateway."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.cli import client, main
from tests.support.running_gateway import RunningGateway, chat_body, make_settings


def test_keys_are_created_listed_used_reported_and_revoked(
    gateway_with_worker, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    url = ("--url", gateway_with_worker.url)
    limits = ("--limit", "requests_a_minute=30", "--limit", "tokens_a_day=5000")
    terms = ("--team", "lab", "--model", "demo", *limits, "--expires-in", "30d")
    assert main(["keys", "create", "Ann", "--yes", *terms, *url]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "shown only this once" in printed[0]
    secret, key_id = printed[-1], printed[0].split()[1]

    assert main(["keys", "list", *url]) == 0
    listed = capsys.readouterr().out
    for text in (key_id, "Ann", "lab", secret[:8], "active", "demo", "30 requests a minute"):
        assert text in listed
    assert secret not in listed

    gateway_with_worker.use_key(secret)
    assert gateway_with_worker.chat().status_code == 200
    assert main(["keys", "usage", *url]) == 0
    assert key_id in capsys.readouterr().out
    assert main(["keys", "usage", "--csv", *url]) == 0
    assert capsys.readouterr().out.startswith("day,key,name,team,requests,")
    assert main(["keys", "usage", "--from", "2020-01-01", "--to", "2020-01-02", *url]) == 0
    assert key_id not in capsys.readouterr().out

    assert main(["keys", "revoke", key_id, *url]) == 0
    assert "Revoked" in capsys.readouterr().out
    assert gateway_with_worker.chat().status_code == 401


class Terminal(io.StringIO):
    """Standard input of a person at a terminal, who types a text."""

    def isatty(self) -> bool:
        return True


def test_the_first_key_needs_a_confirmation_on_a_terminal(gateway, capsys, monkeypatch) -> None:
    create = ["keys", "create", "Ann", "--url", gateway.url]
    warning = "All clients need a key from now on; this cannot be undone."
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    with pytest.raises(SystemExit, match="no key was created"):
        main(create)
    assert warning in capsys.readouterr().err
    assert gateway.admin.get("/admin/v1/keys").json() == {"keys": [], "required": False}

    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(create) == 0
    assert gateway.admin.get("/admin/v1/keys").json()["required"]
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert main(["keys", "create", "Bob", *create[3:]]) == 0, "only the first key needs one"
    assert capsys.readouterr().err == ""


def test_without_a_terminal_the_first_key_needs_consent_in_the_command(
    gateway: RunningGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = ["keys", "create", "Ann", "--url", gateway.url]
    for typed in ("", "y\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        with pytest.raises(SystemExit, match="no key was created; without a terminal, --yes "):
            main(create)
    assert gateway.admin.get("/admin/v1/keys").json() == {"keys": [], "required": False}
    capsys.readouterr()
    assert main([*create, "--yes"]) == 0
    warning = "This is the first key. All clients need a key from now on; this cannot be undone.\n"
    assert capsys.readouterr().err == warning


def test_the_admin_key_comes_from_the_environment(tmp_path, capsys, monkeypatch) -> None:
    keys = {"admin_key": SecretStr("admin-key"), "api_key": SecretStr("static-key")}
    with RunningGateway(make_settings(tmp_path, **keys)) as gateway:
        monkeypatch.setenv("PACELINE_API_KEY", "static-key")
        with pytest.raises(SystemExit, match="A valid admin key is required"):
            main(["keys", "list", "--url", gateway.url])
        monkeypatch.setenv("PACELINE_ADMIN_KEY", "admin-key")
        assert main(["keys", "create", "ci", "--json", "--url", gateway.url]) == 0
        assert json.loads(capsys.readouterr().out)["secret"].startswith("pk-")
        assert main(["status", "--json", "--url", gateway.url]) == 1, "no worker"


def test_keys_are_edited_rotated_and_revoked_by_their_name(gateway, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    url = ("--url", gateway.url)
    gateway.revoke_key(gateway.create_key(name="Ann"))
    ann = gateway.create_key(name="Ann", team="lab", models=["demo"], requests_a_minute=5)

    def shown() -> dict[str, Any]:
        return gateway.admin.get(f"/admin/v1/keys/{ann['id']}").json()

    changes = ("--limit", "tokens_a_day=9", "--clear", "requests_a_minute", "--clear", "models")
    assert main(["keys", "edit", "ann", "--team", "ops", "--model", "gone", *url]) == 0
    assert capsys.readouterr().err == "Warning: No worker serves the model 'gone' now.\n"
    assert main(["keys", "edit", "Ann", "--expires-in", "30d", *changes, *url]) == 0
    printed = capsys.readouterr().out
    assert "of Ann: may use all; limits: 9 tokens a day, until 20" in printed
    expected: dict[str, Any] = {
        "team": "ops",
        "models": [],
        "requests_a_minute": None,
        "tokens_a_day": 9,
    }
    assert shown().items() >= expected.items()
    assert main(["keys", "list", *url]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"until 20\d\d-\d\d-\d\d \d\d:\d\d [A-Z]", listed), "with its zone"
    for wrong, problem in (
        (["Ann"], "nothing to change"),
        (["Ann", "--team", "a", "--clear", "team"], "team cannot be both set and cleared"),
        (["Bob", "--team", "a"], "The key 'Bob' does not exist"),
    ):
        with pytest.raises(SystemExit, match=problem):
            main(["keys", "edit", *wrong, *url])

    assert main(["keys", "rotate", "Ann", *url]) == 0
    assert shown()["prefix"] == capsys.readouterr().out.split()[-1][:8] != ann["prefix"]
    gateway.client.get("/v1/models", headers={"x-api-key": ann["secret"]})
    assert main(["keys", "list", *url]) == 0
    assert "used 1 times since" in " ".join(capsys.readouterr().out.split())
    assert main(["keys", "revoke", "Ann", *url]) == 0
    assert shown()["state"] == "revoked"
    with pytest.raises(SystemExit, match="has been revoked permanently"):
        main(["keys", "edit", "Ann", "--team", "x", *url])


def test_the_admin_key_opens_what_an_admin_asks_on_this_machine(
    gateway_with_worker, capsys, monkeypatch, tmp_path
) -> None:
    """C3: the key opens it, and not the machine: without it each command is refused."""
    gateway_with_worker.create_key(name="Ann")
    url = ("--url", gateway_with_worker.url)
    body = tmp_path / "body.json"
    body.write_text(json.dumps(chat_body()))
    commands = (["ask", "Say a word."], ["explain", str(body)], ["errors"], ["status"])
    for command in commands:
        assert main([*command, *url]) == 0
    assert "admin" in capsys.readouterr().out, "the key that asked is the one that uses most"
    (tmp_path / "admin-key").unlink()
    for command in commands:
        with pytest.raises(SystemExit, match="needs a key"):
            main([*command, *url])


def test_a_command_without_a_key_says_where_to_put_one(
    gateway_with_worker, monkeypatch, tmp_path
) -> None:
    gateway_with_worker.create_key()
    (tmp_path / "admin-key").unlink()
    command = ["status", "--url", gateway_with_worker.url]
    missing = r"needs a key: PACELINE_API_KEY=pk-\.\.\. paceline status$"
    with pytest.raises(SystemExit, match=missing):
        main(command)
    monkeypatch.setenv("PACELINE_API_KEY", "pk-wrong")
    with pytest.raises(SystemExit, match=r"refused: .* reads it from PACELINE_API_KEY\.$"):
        main(command)


def test_c3_commands_send_the_stored_admin_key_to_this_machine_only(
    gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["keys", "list", "--url", gateway.url]
    assert main(command) == 0
    file = tmp_path / "admin-key"
    file.write_text("another")
    with pytest.raises(SystemExit, match=f"PACELINE_ADMIN_KEY, or else from {file}"):
        main(command)
    file.write_text("two\nlines")
    with pytest.raises(SystemExit, match="cannot carry"):
        main(command)
    Path("paceline.yaml").write_text(f"admin_key: {gateway.admin_key}\n")
    assert main(command) == 0
    Path("paceline.yaml").unlink()
    monkeypatch.setenv("PACELINE_ADMIN_KEY", gateway.admin_key)
    assert main(command) == 0
    monkeypatch.delenv("PACELINE_ADMIN_KEY")
    file.unlink()
    with pytest.raises(SystemExit, match="A valid admin key is required"):
        main(command)
    file.mkdir()
    with pytest.raises(SystemExit, match=f"cannot read {file}"):
        main(command)


def test_c3_commands_send_the_stored_admin_key_to_no_other_machine(gateway, monkeypatch) -> None:
    monkeypatch.setattr(client, "is_own", lambda _host: False)
    with pytest.raises(SystemExit, match=r"reads it from PACELINE_ADMIN_KEY\.$"):
        main(["keys", "list", "--url", gateway.url])


@pytest.mark.parametrize("name", ["host", "admin_host"])
def test_l13_settings_of_the_working_folder_send_no_key_to_another_machine(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "admin-key")
    ports = "admin_port: 8001\n" if name == "admin_host" else ""
    Path("paceline.yaml").write_text(f"{name}: 192.0.2.1\n{ports}")
    for command in (["keys", "list"], ["policy", "show"]):
        with pytest.raises(SystemExit, match=r"'192.0.2.1', which is not this machine; name it"):
            main(command)


def test_a_rejection_is_one_message_with_the_field(module_gateway, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", module_gateway.admin_key)
    url = ("--url", module_gateway.url)
    with pytest.raises(SystemExit, match=r"refused: pools\.0: the policy has no pool 'vml'"):
        main(["keys", "create", "Ann", "--yes", "--pool", "vml", *url])
    with pytest.raises(SystemExit, match="refused: tokens_a_week: "):
        main(["keys", "create", "Ann", "--yes", "--limit", "tokens_a_week=5", *url])
    with pytest.raises(SystemExit, match="The key 'key-x' does not exist"):
        main(["keys", "revoke", "key-x", *url])
    with pytest.raises(SystemExit):
        main(["keys", "create", "Ann", "--expires-in", "3w"])
    assert "must be like 90m, 12h or 30d" in capsys.readouterr().err
