"""The policy file: read at the start and on every change; invalid content is rejected and
logged."""

import functools
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.config.policy_versions import Attribution, PolicyVersion, Reason
from gateway.config.settings import Settings
from gateway.errors import StartupError
from gateway.event_loop import run
from gateway.server import serve
from paceline.lifecycle import Shutdown
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.running_gateway import (
    RunningGateway,
    make_settings,
    running_worker,
    wait_until,
)
from tests.support.scripted_worker import ScriptedWorker
from tests.support.static_workers import static_worker


@pytest.fixture(autouse=True)
def short_file_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check policy files more often than a person edits them."""
    monkeypatch.setattr("gateway.assembly._POLICY_FILE_CHECK_S", 0.05)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(to_yaml(single_pool_policy("a")))
    return file


def replace(file: Path, text: str) -> None:
    """Change the file in one step, so that no check reads it empty."""
    replacement = file.with_suffix(".new")
    replacement.write_text(text)
    replacement.replace(file)


def running(file: Path | None, folder: Path, **settings: Any) -> RunningGateway:
    return RunningGateway(make_settings(folder, policy=file, **settings))


def start(settings: Settings) -> None:
    shutdown = Shutdown()
    shutdown.request()
    run(serve(settings, shutdown=shutdown))


def active_policy(gateway: RunningGateway) -> tuple[int, list[str], str]:
    status = gateway.status()
    return status["policy"]["version"], list(status["pools"]), status["policy"]["source"]


def is_active(gateway: RunningGateway, *expected: object) -> Callable[[], bool]:
    return lambda: active_policy(gateway) == expected


def file_problem(gateway: RunningGateway) -> str:
    return str(gateway.status()["policy"].get("file_problem", ""))


def reports(gateway: RunningGateway, message: str) -> bool:
    return message in file_problem(gateway)


def test_at_a_start_the_last_change_wins_of_the_file_and_of_the_admins(file, tmp_path) -> None:
    with running(file, tmp_path) as gateway:
        assert active_policy(gateway) == (1, ["a"], "file")
    with running(None, tmp_path) as gateway, PolicyAdmin(gateway.url, gateway.admin_key) as admin:
        assert active_policy(gateway) == (1, ["a"], "file"), "it needs the file no more"
        admin.put(single_pool_policy("b"))
    file.write_text(f"# as agreed on Monday\n{file.read_text()}")
    with running(file, tmp_path) as gateway:
        assert active_policy(gateway) == (2, ["b"], "admin"), "a changed comment is no change"
    file.write_text(to_yaml(single_pool_policy("c")))
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url, gateway.admin_key) as admin:
        assert active_policy(gateway) == (3, ["c"], "file")
        reasons = [version["reason"] for version in admin.get("/history").json()["versions"]]
        assert reasons == ["file", "edit", "file"]
        admin.edit("POST", {"version": 2}, "/rollback")
    with running(file, tmp_path) as gateway:
        assert active_policy(gateway) == (4, ["b"], "admin")


def test_an_edit_of_an_admin_survives_restart_and_upgrade_without_a_file(tmp_path: Path) -> None:
    with running(None, tmp_path) as gateway, PolicyAdmin(gateway.url, gateway.admin_key) as admin:
        assert active_policy(gateway) == (1, ["text-mtp", "vlm", "embeddings", "rerank"], "shipped")
        admin.put(single_pool_policy("b"))
    with running(None, tmp_path) as gateway:
        assert active_policy(gateway) == (2, ["b"], "admin")


def test_f45_an_invalid_file_fails_the_start_with_file_line_and_field(file, tmp_path) -> None:
    settings = make_settings(tmp_path, policy=file)
    start(settings)  # the stored policy is valid, and does not replace an invalid file
    assert (tmp_path / "state.json").exists()
    for content, message in (
        (b"version: 1\nroutes: []\npools: {a: {lanes: [x]}}", "line 2: routes: "),
        (b"version: 1\n\ncolour: red", "line 3: colour: unknown field"),
        (b"version: 1\nroutes:\n- a: [", "line 3: the bracket that opens here is not closed"),
        (b"", "it must be a mapping"),
        (b"\xff\xff", "the file cannot be read"),
        (b"#" * 2_000_000, "larger than 1048576 bytes"),
        (None, "the file cannot be read"),
    ):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.raises(StartupError, match=rf"policy\.yaml is invalid: .*{message}"):
            start(settings)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"host": "0.0.0.0"}, "Set PACELINE_API_KEY first"),
        ({"host": "0.0.0.0", "admin_port": 0}, "Set PACELINE_API_KEY first"),
        ({"port": None}, "Cannot listen on 127.0.0.1 port {}: another program uses the port"),
        ({"admin_port": None}, "Cannot listen on 127.0.0.1 port {}.*PACELINE_ADMIN_PORT"),
    ],
    ids=str,
)
def test_a_start_on_a_host_without_keys_or_an_occupied_port_fails_and_changes_no_policy(
    file: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = make_settings(tmp_path, policy=file)
        resolved = {name: port if value is None else value for name, value in changes.items()}
        with pytest.raises(StartupError, match=problem.format(port)):
            start(settings.model_copy(update=resolved))
    assert not (tmp_path / "state.json").exists()


def test_unreadable_state_fails_the_start(file: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder")
    settings = make_settings(blocked / "state", policy=file)
    with pytest.raises(StartupError, match="cannot be read"):
        start(settings)


def test_a_changed_file_is_loaded_at_run_time(file, tmp_path, worker) -> None:
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url, gateway.admin_key) as admin:
        gateway.join(worker)
        assert gateway.chat().headers["x-paceline-pool"] == "a"
        file.write_text(to_yaml(single_pool_policy("b")))
        wait_until(is_active(gateway, 2, ["b"], "file"))
        assert gateway.chat().headers["x-paceline-pool"] == "b"
        replace(file, to_yaml(single_pool_policy("c")))
        wait_until(is_active(gateway, 3, ["c"], "file"))
        admin.put(single_pool_policy("d"))
        file.write_text(to_yaml(single_pool_policy("c")) + "# saved again\n")
        file.write_text(to_yaml(single_pool_policy("d")))
        wait_until(is_active(gateway, 5, ["d"], "file"))
        admin.put(single_pool_policy("e"))
    with running(file, tmp_path) as gateway:
        assert active_policy(gateway) == (6, ["e"], "admin"), "the file is loaded only once"


@pytest.mark.parametrize("stored", ["by an admin", "by the file"])
def test_c15_a_policy_that_an_older_paceline_accepted_stops_no_start(
    file: Path, tmp_path: Path, log_capture, capsys, stored: str
) -> None:
    """The last version that is still valid is active, and each place says so until an edit."""
    with running(file, tmp_path) as gateway:
        assert active_policy(gateway) == (1, ["a"], "file")
    accepted = {**single_pool_policy("b"), "models": {"demo": {"aliases": ["gpt-*"]}}}
    by = Attribution("ann", "", Reason.EDIT)
    if stored == "by the file":
        file.write_text(to_yaml(accepted))
        by = by._replace(reason=Reason.FILE)
    version = PolicyVersion.following(1, accepted, by, "then", file.read_text()).model_dump()
    records = tmp_path / "state.json"
    state = json.loads(records.read_text())
    records.write_text(json.dumps({**state, "policy": {**state["policy"], "2": version}}))
    if stored == "by the file":
        reads = {"policy_file": {str(file): version}}
        (tmp_path / "policy-files.json").write_text(json.dumps(reads))
    with running(file, tmp_path) as gateway, running_worker() as worker:
        gateway.join(worker)
        assert active_policy(gateway) == (1, ["a"], "file")
        told = "This gateway cannot use what is stored as policy 2. Its log says why."
        assert gateway.client.get("/readyz").text.startswith(f"ready, degraded: {told}")
        assert main(["status", "--url", gateway.url]) == 0
        assert told in " ".join(capsys.readouterr().out.split())
        history = gateway.admin.get("/admin/v1/policy/history").json()
        assert (history["versions"][0]["number"], history["active"]) == (2, 1)
        assert history["problem"] == "This gateway cannot use version 2; its log says why."
        if stored == "by the file":
            wait_until(lambda: "without '*'" in file_problem(gateway))
            assert "The policy file is not active" in gateway.client.get("/readyz").text
            file.write_text(to_yaml(single_pool_policy("c")))
            wait_until(is_active(gateway, 3, ["c"], "file"))
        else:
            with PolicyAdmin(gateway.url, gateway.admin_key) as admin:
                admin.put(single_pool_policy("c"))
        wait_until(lambda: gateway.client.get("/readyz").text == "ready\n")
    assert any("name='2' why=models.demo.aliases" in text for text in log_capture.texts)


def test_f45_f46_an_invalid_file_is_rejected_and_logged_and_the_policy_stays_active(
    file: Path, tmp_path: Path, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    valid = to_yaml(single_pool_policy("a"))
    with running(file, tmp_path) as gateway:
        invalid = {
            "version: 1\nroutes: [": "is not closed",
            valid[: len(valid) // 2]: "routes",
            valid + "colour: red\n": "colour: unknown field",
            valid.replace("- a", "- b"): "there is no pool 'b'",
            "!!python/object:os.system {}": "a policy cannot have tags",
        }
        for text, message in invalid.items():
            caplog.clear()
            replace(file, text)
            wait_until(functools.partial(reports, gateway, message))
            assert "line " in file_problem(gateway)
            history = gateway.admin.get("/admin/v1/policy/history").json()
            assert history["problem"] == f"The policy file is not in force: {file_problem(gateway)}"
            assert str(file) not in gateway.client.get("/v1/status").text
            (rejection,) = [one for one in caplog.records if "policy_file.rejected" in one.message]
            assert (rejection.levelno, str(file) in rejection.message) == (logging.ERROR, True)
            assert message in rejection.message
            assert active_policy(gateway) == (1, ["a"], "file")
            gateway.join(worker)
            assert gateway.chat().headers["x-paceline-pool"] == "a"
        assert "paceline_policy_file_refused 1.0" in gateway.client.get("/metrics").text
        file.unlink()
        wait_until(lambda: file_problem(gateway) == "the file cannot be read")
        file.write_text(valid)
        wait_until(lambda: not file_problem(gateway))
        assert active_policy(gateway) == (1, ["a"], "file")
        assert "paceline_policy_file_refused 0.0" in gateway.client.get("/metrics").text
        file.write_text(to_yaml(single_pool_policy("b")))
        wait_until(is_active(gateway, 2, ["b"], "file"))


def test_f47_gateways_with_shared_state_converge_on_one_version(file: Path, tmp_path: Path) -> None:
    with running(file, tmp_path) as first, running(file, tmp_path) as second:
        assert active_policy(first) == active_policy(second) == (1, ["a"], "file")
        with PolicyAdmin(first.url, first.admin_key) as admin:
            admin.put(single_pool_policy("b"))
        wait_until(is_active(second, 2, ["b"], "admin"))
        with PolicyAdmin(second.url, second.admin_key) as admin:
            admin.put(single_pool_policy("c"))
        wait_until(is_active(first, 3, ["c"], "admin"))
        file.write_text(to_yaml(single_pool_policy("d")))
        wait_until(is_active(first, 4, ["d"], "file"))
        wait_until(is_active(second, 4, ["d"], "file"))
        with PolicyAdmin(first.url, first.admin_key) as admin:
            assert len(admin.get("/history").json()["versions"]) == 4


def worker_settings(pool: str) -> dict[str, Any]:
    return {"workers": (static_worker(url="http://127.0.0.1:9", pools=[pool], slots=1),)}


def test_a_policy_without_the_pools_of_static_workers_is_rejected_and_fails_a_start(
    file: Path, tmp_path: Path
) -> None:
    """The active policy counts, not the file."""
    problem = "'studio' is configured for the pool 'a'"
    with (
        running(file, tmp_path, **worker_settings("a")) as gateway,
        PolicyAdmin(gateway.url, gateway.admin_key) as admin,
    ):
        assert admin.patch({"pools": {"a": None}}).status_code == 400
        rejected = admin.put(single_pool_policy("b"))
        assert rejected.status_code == 400
        assert problem in rejected.text
        assert not admin.post("/validate", single_pool_policy("b"))["valid"]
        file.write_text(to_yaml(single_pool_policy("b")))
        wait_until(lambda: problem in file_problem(gateway))
        assert active_policy(gateway) == (1, ["a"], "file")
    file.write_text(to_yaml(single_pool_policy("a")))
    with running(file, tmp_path) as gateway, PolicyAdmin(gateway.url, gateway.admin_key) as admin:
        admin.put(single_pool_policy("b"))
    with running(file, tmp_path, **worker_settings("b")) as gateway:
        assert active_policy(gateway) == (2, ["b"], "admin")
    with pytest.raises(StartupError, match=problem):
        start(make_settings(tmp_path, policy=file, **worker_settings("a")))
