"""The policy file: taken at the start and when it is edited, or refused aloud; edits survive it."""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.errors import StartupError
from gateway.server import run, serve
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.running_gateway import RunningGateway, make_settings, wait_until
from tests.support.scripted_worker import ScriptedWorker
from workers.lifecycle import Shutdown


@pytest.fixture(autouse=True)
def short_file_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gateways look at their files more often than people edit them."""
    monkeypatch.setattr("gateway.assembly._POLICY_FILE_CHECK_S", 0.05)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(to_yaml(single_pool_policy("a")))
    return file


def running(file: Path | None, folder: Path, **settings: Any) -> RunningGateway:
    return RunningGateway(make_settings(folder, policy=file, **settings))


def start(settings: Settings) -> None:
    """Start a gateway that ends at once."""
    shutdown = Shutdown()
    shutdown.request()
    run(serve(settings, shutdown=shutdown))


def in_force(gateway: RunningGateway) -> tuple[int, list[str], str]:
    """Tell version, pools and source of what is in force."""
    status = gateway.status()
    return status["policy"]["version"], list(status["pools"]), status["policy"]["source"]


def says(gateway: RunningGateway, *expected: object) -> Callable[[], bool]:
    return lambda: in_force(gateway) == expected


def problem(gateway: RunningGateway) -> str:
    return str(gateway.status()["policy"].get("file_problem", ""))


def tells(gateway: RunningGateway, sentence: str) -> bool:
    return sentence in problem(gateway)


def test_an_edit_of_an_admin_survives_a_restart(file: Path, tmp_path: Path) -> None:
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url) as admin:
        assert in_force(gateway) == (1, ["a"], "file")
        admin.put(single_pool_policy("b"))
    for _ in range(2):
        with running(file, tmp_path) as gateway:
            assert in_force(gateway) == (2, ["b"], "admin")


def test_an_edit_of_an_admin_survives_restart_and_upgrade_without_a_file(tmp_path: Path) -> None:
    with running(None, tmp_path) as gateway, PolicyAdmin(gateway.url) as admin:
        assert in_force(gateway) == (1, ["text-mtp", "vlm"], "shipped")
        admin.put(single_pool_policy("b"))
    with running(None, tmp_path) as gateway:
        assert in_force(gateway) == (2, ["b"], "admin")


def test_an_edit_of_the_file_while_the_gateway_was_off_is_taken(file: Path, tmp_path: Path) -> None:
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url) as admin:
        admin.put(single_pool_policy("b"))
    file.write_text(to_yaml(single_pool_policy("c")))
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url) as admin:
        assert in_force(gateway) == (3, ["c"], "file")
        reasons = [one["reason"] for one in admin.get("/history").json()["versions"]]
        assert reasons == ["file", "edit", "file"]
        admin.edit("POST", {"version": 2}, "/rollback")
    with running(file, tmp_path) as gateway:
        assert in_force(gateway) == (4, ["b"], "admin")


def test_another_comment_in_the_file_is_no_edit_of_the_policy(file: Path, tmp_path: Path) -> None:
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url) as admin:
        admin.put(single_pool_policy("b"))
    file.write_text(f"# as agreed on Monday\n{file.read_text()}")
    with running(file, tmp_path) as gateway:
        assert in_force(gateway) == (2, ["b"], "admin")


def test_without_a_file_what_was_in_force_stays_in_force(file: Path, tmp_path: Path) -> None:
    with running(file, tmp_path):
        pass
    with running(None, tmp_path) as gateway:
        assert in_force(gateway) == (1, ["a"], "file")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("version: 1\nroutes: []\npools: {a: {lanes: [x]}}", r"line 2: routes: "),
        ("version: 1\n\ncolour: red", r"line 3: colour: unknown field"),
        ("version: 1\nroutes:\n- a: [", r"line \d: it is not valid YAML"),
        ("", r"it must be a mapping"),
    ],
)
def test_f45_a_bad_file_stops_the_start_with_file_line_and_field(
    file: Path, tmp_path: Path, text: str, sentence: str
) -> None:
    with running(file, tmp_path):
        pass  # what is kept is good, and is not taken in its place
    file.write_text(text)
    with pytest.raises(StartupError, match=rf"policy\.yaml is invalid: .*{sentence}"):
        start(make_settings(tmp_path, policy=file))


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "0.0.0.0"},
        {"host": "0.0.0.0", "admin_port": 0},
        {"admin_host": "0.0.0.0", "admin_port": 0},
        {"port": None},
        {"admin_port": None},
    ],
    ids=str,
)
def test_a_start_that_is_refused_changes_no_policy(
    file: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = make_settings(tmp_path, policy=file)
        changes = {name: port if value is None else value for name, value in wrong.items()}
        with pytest.raises(StartupError, match=r"Set PACELINE_|Cannot listen on"):
            start(settings.model_copy(update=changes))
    assert not (tmp_path / "state.json").exists()


def test_a_file_that_is_missing_or_no_text_or_huge_stops_the_start(
    file: Path, tmp_path: Path
) -> None:
    settings = make_settings(tmp_path, policy=file)
    file.write_bytes(b"\xff\xff")
    with pytest.raises(StartupError, match=r"policy\.yaml is invalid: the file cannot be read"):
        start(settings)
    file.write_bytes(b"#" * 2_000_000)
    with pytest.raises(StartupError, match="larger than 1048576 bytes"):
        start(settings)
    file.unlink()
    with pytest.raises(StartupError, match=r"policy\.yaml is invalid: the file cannot be read"):
        start(settings)


def test_a_state_that_cannot_be_written_or_read_stops_the_start(file: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder")
    settings = make_settings(blocked / "state", policy=file)
    with pytest.raises(StartupError, match="cannot be read"):
        start(settings)
    (tmp_path / "state.json").write_text('{"policy": {"1": {"number": 1}}}')
    with pytest.raises(StartupError, match=r"The stored versions of the policy in .* are damaged"):
        start(make_settings(tmp_path, policy=file))


def test_an_edit_of_the_file_is_taken_while_the_gateway_runs(
    file: Path, tmp_path: Path, worker: ScriptedWorker
) -> None:
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url) as admin:
        gateway.send_heartbeat(worker)
        assert gateway.chat().headers["x-paceline-pool"] == "a"
        file.write_text(to_yaml(single_pool_policy("b")))
        wait_until(says(gateway, 2, ["b"], "file"))
        assert gateway.chat().headers["x-paceline-pool"] == "b"
        replacing = file.with_suffix(".new")
        replacing.write_text(to_yaml(single_pool_policy("c")))
        replacing.replace(file)
        wait_until(says(gateway, 3, ["c"], "file"))
        admin.put(single_pool_policy("d"))
        file.write_text(to_yaml(single_pool_policy("c")) + "# saved again\n")
        file.write_text(to_yaml(single_pool_policy("e")))
        wait_until(says(gateway, 5, ["e"], "file"))


def test_f45_f46_a_bad_edit_of_the_file_is_refused_aloud_and_what_was_good_stays(
    file: Path, tmp_path: Path, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    good = to_yaml(single_pool_policy("a"))
    with running(file, tmp_path) as gateway:
        bad = {
            "version: 1\nroutes: [": "it is not valid YAML",
            good[: len(good) // 2]: "routes",
            good + "colour: red\n": "colour: unknown field",
            good.replace("- a", "- b"): "there is no pool 'b'",
            "!!python/object:os.system {}": "it is not valid YAML",
        }
        for text, sentence in bad.items():
            caplog.clear()
            file.write_text(text)
            wait_until(functools.partial(tells, gateway, sentence))
            assert "line " in problem(gateway)
            assert str(file) not in gateway.client.get("/v1/status").text
            (refused,) = [one for one in caplog.records if "policy_file.rejected" in one.message]
            assert (refused.levelno, str(file) in refused.message) == (logging.ERROR, True)
            assert sentence in refused.message
            assert in_force(gateway) == (1, ["a"], "file")
            gateway.send_heartbeat(worker)
            assert gateway.chat().headers["x-paceline-pool"] == "a"
        assert "paceline_policy_file_refused 1.0" in gateway.client.get("/metrics").text
        file.unlink()
        wait_until(lambda: problem(gateway) == "the file cannot be read")
        file.write_text(good)
        wait_until(lambda: not problem(gateway))
        assert in_force(gateway) == (1, ["a"], "file")
        assert "paceline_policy_file_refused 0.0" in gateway.client.get("/metrics").text
        file.write_text(to_yaml(single_pool_policy("b")))
        wait_until(says(gateway, 2, ["b"], "file"))


def test_a_file_that_says_what_an_admin_said_is_remembered_as_read(
    file: Path, tmp_path: Path
) -> None:
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url) as admin:
        admin.put(single_pool_policy("b"))
        file.write_text(to_yaml(single_pool_policy("b")))
        wait_until(says(gateway, 3, ["b"], "file"))
        admin.put(single_pool_policy("c"))
    with running(file, tmp_path) as gateway:
        assert in_force(gateway) == (4, ["c"], "admin")


def test_f47_gateways_that_share_their_state_come_to_the_same_version(
    file: Path, tmp_path: Path
) -> None:
    with running(file, tmp_path) as here, running(file, tmp_path) as there:
        assert in_force(here) == in_force(there) == (1, ["a"], "file")
        with PolicyAdmin(here.url) as admin:
            admin.put(single_pool_policy("b"))
        wait_until(says(there, 2, ["b"], "admin"))
        with PolicyAdmin(there.url) as admin:
            admin.put(single_pool_policy("c"))
        wait_until(says(here, 3, ["c"], "admin"))
        file.write_text(to_yaml(single_pool_policy("d")))
        wait_until(says(here, 4, ["d"], "file"))
        wait_until(says(there, 4, ["d"], "file"))
        with PolicyAdmin(here.url) as admin:
            assert len(admin.get("/history").json()["versions"]) == 4


LISTED = {"id": "studio", "kind": "openai", "url": "http://127.0.0.1:9", "models": ["demo"]}


def listing(pool: str) -> dict[str, Any]:
    return {"workers": Settings(workers=[{**LISTED, "pools": [pool], "slots": 1}]).workers}  # type: ignore[arg-type]


def test_a_policy_that_would_stop_the_next_start_is_not_taken(file: Path, tmp_path: Path) -> None:
    with running(file, tmp_path, **listing("a")) as gateway, PolicyAdmin(gateway.url) as admin:
        for response in (admin.put(single_pool_policy("b")), admin.patch({"pools": {"a": None}})):
            assert response.status_code == 400
        assert "'studio' is configured for the pool 'a'" in admin.put(single_pool_policy("b")).text
        assert not admin.post("/validate", single_pool_policy("b"))["valid"]
        file.write_text(to_yaml(single_pool_policy("b")))
        wait_until(lambda: "'studio' is configured for the pool 'a'" in problem(gateway))
        assert in_force(gateway) == (1, ["a"], "file")


def test_listed_workers_are_held_against_what_is_in_force_and_not_against_the_file(
    file: Path, tmp_path: Path
) -> None:
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url) as admin:
        admin.put(single_pool_policy("b"))
    with running(file, tmp_path, **listing("b")) as gateway:
        assert in_force(gateway) == (2, ["b"], "admin")
    settings = make_settings(tmp_path, policy=file, **listing("a"))
    with pytest.raises(StartupError, match="'studio' is configured for the pool 'a'"):
        start(settings)
