"""A policy that lacks a pool which keys name: it is told of, and not refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gateway.cli import main
from tests.support.policies import Admin, as_yaml, document
from tests.support.running_gateway import Gateway, eventually, settings_for_tests


def sentences(told: dict[str, list[dict[str, str]]]) -> list[str]:
    return [warning["sentence"] for warning in told["warnings"]]


def test_a_policy_that_lacks_the_pools_of_a_key_is_applied_with_a_warning(
    line: Gateway, admin: Admin
) -> None:
    line.make_key(name="everywhere")
    gone = line.make_key(name="gone", pools=["text-mtp"])
    line.admin.delete(f"/admin/v1/keys/{gone['id']}")
    ann = line.make_key(name="Ann", pools=["text-mtp"])
    bob = line.make_key(name="Bob", pools=["text-mtp", "vlm"])
    told = [
        f"the key {ann['id']} (Ann) names 'text-mtp', which is not there: it could use no pool at "
        "all",
        f"the key {bob['id']} (Bob) names 'text-mtp', which is not there: only vlm is left to it",
    ]
    assert sentences(admin.ask("/validate", document("vlm"))) == told
    assert sentences(admin.ask("/diff", document("vlm"))) == told
    applied = admin.put(document("vlm"))
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
    monkeypatch.setattr("gateway.config.policy_file.LOOK_S", 0.05)
    file = tmp_path / "policy.yaml"
    file.write_text(as_yaml(document("a")))
    settings = settings_for_tests(tmp_path, policy=file)

    def warned() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]

    with Gateway(settings) as gateway, Admin(gateway.url) as admin:
        gateway.make_key(name="Ann", pools=["a"])
        assert not warned()
        if way == "an admin":
            admin.put(document("b"))
        elif way == "the file":
            file.write_text(as_yaml(document("b")))
            eventually(lambda: bool(warned()))
    if way == "the file at a start":
        file.write_text(as_yaml(document("b")))
        with Gateway(settings):
            pass
    (warning,) = warned()
    assert warning.startswith("policy.warning version=2 what=the key key-")
    assert "(Ann) names 'a', which is not there" in warning


def test_a_pool_gets_another_name_and_its_keys_follow(line: Gateway, admin: Admin) -> None:
    ann = line.make_key(name="Ann", pools=["vlm"])
    line.bear(ann["secret"])
    assert len(admin.put(document("all")).json()["warnings"]) == 1
    assert line.chat().json()["error"]["code"] == "pool_not_allowed"
    follows = line.admin.patch(f"/admin/v1/keys/{ann['id']}", json={"pools": ["all"]})
    assert follows.status_code == 200
    assert line.chat().headers["x-paceline-pool"] == "all"


def test_the_command_warns_too(
    line: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line.make_key(name="Ann", pools=["text-mtp"])
    file = tmp_path / "mine.yaml"
    file.write_text(as_yaml(document("vlm")))
    for command in (["validate"], ["diff"], ["apply", "--note", "x"]):
        assert main(["policy", *command, str(file), "--url", line.url]) == 0
        assert "(Ann) names 'text-mtp', which is not there" in capsys.readouterr().out
