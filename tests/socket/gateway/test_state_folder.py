"""A gateway takes secrets and state from no folder that others may write."""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from stat import S_IMODE
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.cli import main
from gateway.config.startup_checks import check_state, ensure_secrets
from gateway.errors import RecordsUnwritable, StartupError
from gateway.server import serve
from gateway.state import records as records_module
from gateway.state.records import FileRecords
from paceline.lifecycle import Shutdown
from tests.support.gateway_fixtures import QUICK
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    make_settings,
    status_and_code,
    wait_until,
)
from workers.server.main import read_settings
from workers.settings import prefix_cache_on_disk

FILES = ("admin-key", "join-token", "state.json", "shared-1.json")


@pytest.fixture(autouse=True)
def permissive_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    for name in FILES:
        (folder / name).touch(mode=0o644)
        (folder / name).write_text("{}")
    return folder


def test_f85_state_that_cannot_be_written_is_told_everywhere_and_a_revocation_holds_at_once(
    tmp_path, worker, log_capture, capsys
) -> None:
    timing = replace(QUICK, usage_flush_s=0.05)
    with RunningGateway(make_settings(tmp_path), timing) as gateway:
        gateway.use_key(gateway.create_key()["secret"])
        key = gateway.create_key()
        lock, kept = tmp_path / ".state.json.lock", tmp_path / "kept.lock"
        lock.rename(kept)
        lock.mkdir()  # root ignores permissions
        problem = f"{tmp_path / 'state.json'} cannot be written: Is a directory."
        refused = gateway.admin.post("/admin/v1/keys", json={"name": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].endswith(problem)
        assert gateway.status()["store"]["state"] == "degraded"
        assert gateway.client.get("/readyz").text == f"no worker, degraded: {problem}\n"
        gateway.join(worker)
        assert gateway.client.get("/readyz").text == f"ready, degraded: {problem}\n"
        assert gateway.metric("state_unwritable") == 1
        assert gateway.metric("store_degraded") == 0, "it is no trouble with Redis"
        unkept = gateway.admin.delete(f"/admin/v1/keys/{key['id']}")
        assert status_and_code(unkept) == (503, "revocation_unstored")
        assert gateway.chat(headers=bearer_headers(key)).status_code == 401
        assert gateway.status()["store"]["file_problem"] == (
            f"{problem} Keys revoked since then are refused only until a restart."
        )
        os.environ["PACELINE_API_KEY"] = gateway.client.headers["authorization"][7:]
        assert main(["status", "--url", gateway.url]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "Edits are refused:" in told
        assert "Keys revoked since then are refused only until a restart." in told
        lock.rmdir()
        kept.rename(lock)
        wait_until(lambda: gateway.status()["store"]["state"] == "ok")
        assert gateway.metric("state_unwritable") == 0
        wait_until(lambda: f'"{key["id"]}/revoked"' in (tmp_path / "state.json").read_text())
    logged = [text for text in log_capture.texts if text.startswith("records.")]
    assert logged == [
        f"records.unwritable problem={problem}",
        f"records.writable path={tmp_path / 'state.json'}",
    ]


@pytest.mark.parametrize(
    ("disk", "told"),
    [
        ({"f_bavail": 0}, True),
        ({"f_flag": os.ST_RDONLY}, True),
        ({}, False),
    ],
)
async def test_f85_an_idle_gateway_notices_a_disk_that_is_full_or_read_only(
    tmp_path, monkeypatch, disk, told
) -> None:
    """It tries a write only where that seems to fail, so that an idle disk may sleep."""
    records, writes = FileRecords(tmp_path / "state.json"), []
    await records.add("keys", "a", "1")

    def replace_file(path: Path, _text: str) -> None:
        writes.append(path)
        raise OSError(errno.ENOSPC, "")

    given = SimpleNamespace(**{"f_bavail": 10**9, "f_frsize": 4096, "f_flag": 0, **disk})
    monkeypatch.setattr(os, "statvfs", lambda _: given)
    monkeypatch.setattr(records_module, "replace_file", replace_file)
    with contextlib.suppress(RecordsUnwritable):
        await records.probe()
    assert bool(writes) == bool(records.problem) == told
    assert await records.all("keys") == {"a": "1"}


async def test_l8_a_gateway_creates_a_folder_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    ensure_secrets(make_settings(folder, admin_key=None))
    modes = {path.name: S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes.pop("state") == 0o700
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
@pytest.mark.parametrize("name", ["", *FILES])
async def test_l8_a_gateway_does_not_start_where_others_may_write_its_secrets(
    folder: Path, name: str, mode: int
) -> None:
    path = folder / name
    path.chmod(mode)
    with pytest.raises(StartupError) as error:
        await serve(make_settings(folder), shutdown=Shutdown())
    expected = f"from {path}: other users may write to it. "
    assert expected in str(error.value)
    assert f"`chmod go-w {path}`" in str(error.value)
    path.chmod(mode & ~0o22)
    check_state(make_settings(folder))


@pytest.mark.parametrize("name", ["", *FILES])
@pytest.mark.parametrize(
    ("owner", "refused"), [("other", True), ("other's link", True), ("root", False), ("own", False)]
)
def test_l8_a_gateway_takes_nothing_of_another_user(
    folder: Path, name: str, owner: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, user_id, path = os.stat, 4321, str(folder / name)
    others = {"other": 1234, "root": 0, "own": user_id}

    def owned(of: Any, *, follow_symlinks: bool = True, **options: Any) -> os.stat_result:
        mode, *found = stat(of, follow_symlinks=follow_symlinks, **options)
        other = 1234 if owner == "other's link" and not follow_symlinks else user_id
        found[3] = others.get(owner, other) if str(of) == path else user_id
        return os.stat_result((mode, *found))

    monkeypatch.setattr(os, "geteuid", lambda: user_id)
    monkeypatch.setattr(os, "stat", owned)
    expected = pytest.raises(StartupError, match=f"from {path}: it belongs to another user")
    with expected if refused else contextlib.nullcontext():
        check_state(make_settings(folder))


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_l8_a_worker_takes_no_secret_from_a_file_that_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path))
    settings = read_settings([])
    _, secret = prefix_cache_on_disk(settings)
    (tmp_path / "prefix-cache-secret").chmod(mode)
    folder, again = prefix_cache_on_disk(settings)
    assert (folder is not None, again == secret) == (mode == 0o600, mode == 0o600)
