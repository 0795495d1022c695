"""`paceline backup` and `paceline restore`, with the state folder of a real gateway."""

import json
import shutil
from pathlib import Path

import pytest

from gateway.cli import backup, main
from tests.support.running_gateway import RunningGateway, make_settings

PASSPHRASE = "correct horse battery"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the state folder of the commands."""
    folder = tmp_path / "state"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_STATE_DIR", str(folder))
    monkeypatch.setenv("PACELINE_PORT", "1")
    monkeypatch.setenv(backup.PASSPHRASE, PASSPHRASE)
    return folder


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    return str(end.value)


def test_a_restored_gateway_has_its_keys_policies_and_secrets_again(
    folder, monkeypatch, capsys
) -> None:
    with RunningGateway(make_settings(folder)) as gateway:
        kept = gateway.create_key(name="kept")
        revoked = gateway.create_key(name="revoked later")
        monkeypatch.setenv("PACELINE_PORT", gateway.url.rpartition(":")[2])
        assert main(["backup", "kept.backup"]) == 0
        assert "state.json" in capsys.readouterr().out
        sealed = Path("kept.backup").read_bytes()
        assert kept["id"].encode() not in sealed
        assert b"state.json" not in sealed
        gateway.revoke_key(revoked)
        assert "Stop it, such as by" in refusal("restore", "kept.backup")
    later = (folder / "state.json").read_text()
    assert main(["restore", "kept.backup"]) == 0
    assert "Keys that were revoked since then are valid again" in capsys.readouterr().out
    (old,) = folder.glob("before-restore-*")
    assert (old / "state.json").read_text() == later

    shutil.rmtree(folder)  # another Mac
    assert main(["restore", "kept.backup"]) == 0
    assert (folder / "state.json").stat().st_mode & 0o777 == 0o600
    with RunningGateway(make_settings(folder)) as gateway:
        for key in (kept, revoked):
            gateway.use_key(key["secret"])
            assert gateway.client.get("/v1/models").status_code == 200


def test_only_a_whole_file_and_its_passphrase_open_a_backup(folder, tmp_path, monkeypatch) -> None:
    assert "has no state yet" in refusal("backup", "a")
    folder.mkdir(mode=0o700)
    (folder / "state.json").write_text("{}")
    (folder / "photo").write_bytes(b"\xff")
    (folder / "prefix-cache").mkdir()
    assert main(["backup", "a"]) == 0
    assert refusal("backup", "a") == "paceline: a cannot be written: File exists."
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert "cannot be written: No such file" in refusal("backup", "none/a")

    sealed = (tmp_path / "a").read_bytes()
    for at in (20, 40, len(sealed) - 1):  # the salt, the nonce, the end
        (tmp_path / "b").write_bytes(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])
        assert "The passphrase is wrong, or the file is damaged." in refusal("restore", "b")
    for content in (b"", sealed[:30], b"PK" + sealed):
        (tmp_path / "b").write_bytes(content)
        assert refusal("restore", "b") == "paceline: b is not a backup of Paceline."
    assert "cannot be read: No such file" in refusal("restore", "none")
    monkeypatch.setenv(backup.PASSPHRASE, "another passphrase")
    assert "The passphrase is wrong" in refusal("restore", "a")
    monkeypatch.setenv(backup.PASSPHRASE, "too short")
    assert "at least 12 characters" in refusal("backup", "c")
    monkeypatch.delenv(backup.PASSPHRASE)
    assert f"comes from {backup.PASSPHRASE}." in refusal("backup", "c")
    assert [path.name for path in folder.glob("*.json")] == ["state.json"]


@pytest.mark.parametrize("name", ["../outside", ".hidden", "a/b", ""])
def test_a_backup_writes_into_the_state_folder_only(folder, tmp_path, name: str) -> None:
    content = json.dumps({"created": "", "version": "", "files": {name: "text"}}).encode()
    salt, nonce = bytes(16), bytes(12)
    sealed = backup._cipher(PASSPHRASE, salt).encrypt(nonce, content, backup._BEGIN)
    (tmp_path / "a").write_bytes(backup._BEGIN + salt + nonce + sealed)
    assert "whose name no state folder has" in refusal("restore", "a")
    assert not folder.exists()
