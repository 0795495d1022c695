"""A gateway takes secrets and state from no folder that others may write."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE
from typing import Any

import pytest

from gateway.config.startup_checks import check_state, ensure_secrets
from gateway.errors import StartupError
from gateway.server import serve
from paceline.lifecycle import Shutdown
from tests.support.running_gateway import make_settings
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
    expected = f"from {path}: other users may write there. "
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
