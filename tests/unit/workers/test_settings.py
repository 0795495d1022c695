"""Settings of a worker: precedence, errors that name the setting, default name and address."""

import stat
from pathlib import Path

import pytest

from paceline.addresses import is_loopback
from paceline.names import name_of_host
from paceline.settings import InvalidSettings
from tests.support.scheduler_harness import worker_report
from workers.engine.types import LaneName
from workers.heartbeat import advertised_url
from workers.server.main import read_settings
from workers.settings import prefix_cache_on_disk


@pytest.fixture(autouse=True)
def state_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Run in an empty folder, without any Paceline setting of this machine but a state folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("JOIN_TOKEN", "CONFIG", "WORKER_PORT", "WORKER_LANES", "WORKER_LABELS"):
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def cache_of(*arguments: str) -> tuple[Path | None, bytes]:
    """Return the folder and the secret of the prefix cache."""
    return prefix_cache_on_disk(read_settings(arguments))


def mode_of(path: Path | str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def test_a_worker_listens_on_loopback_with_both_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and port of the gateway do not apply to it."""
    monkeypatch.setenv("PACELINE_PORT", "8000")
    monkeypatch.setenv("PACELINE_HOST", "0.0.0.0")
    settings = read_settings([])
    assert (settings.listening_host, settings.port) == ("127.0.0.1", 9200)
    assert settings.lanes == (LaneName.TEXT_MTP, LaneName.VLM)
    assert settings.draft_tokens == 2


def test_the_bits_of_kept_keys_are_8_or_16_from_a_flag_or_the_file(tmp_path: Path) -> None:
    assert [read_settings(flags).kv_bits for flags in ([], ["--kv-bits", "8"])] == [16, 8]
    (tmp_path / "paceline.yaml").write_text("worker: {kv_bits: 8}")
    assert read_settings([]).kv_bits == 8
    with pytest.raises(InvalidSettings, match=r"--kv-bits.*8 or 16"):
        read_settings(["--kv-bits", "4"])


def test_flags_override_the_environment_and_that_overrides_the_file(monkeypatch, tmp_path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("worker: {port: 1, draft_tokens: 1, id: filed}\nworkers: []\n")
    monkeypatch.setenv("PACELINE_CONFIG", str(file))
    monkeypatch.setenv("PACELINE_WORKER_PORT", "2")
    monkeypatch.setenv("PACELINE_WORKER_DRAFT_TOKENS", "2")
    settings = read_settings(["--port", "3"])
    assert (settings.port, settings.draft_tokens, settings.id) == (3, 2, "filed")


def test_lists_are_lists_in_the_file_of_the_working_folder_and_texts_or_repeated_flags_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "paceline.yaml").write_text("worker: {labels: [big, lab-2], lanes: [vlm]}")
    assert read_settings([]).lanes == (LaneName.VLM,)
    assert read_settings(["--lanes", "vlm, text-mtp"]).lanes == (LaneName.VLM, LaneName.TEXT_MTP)
    assert read_settings([]).labels == ("big", "lab-2")
    monkeypatch.setenv("PACELINE_WORKER_LABELS", "small, new")
    assert read_settings([]).labels == ("small", "new")
    assert read_settings(["--label", "big", "--label", "bf16"]).labels == ("big", "bf16")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--port", "99999"], "--port"),
        (["--lanes", "fast"], "--lanes"),
        (["--label", "a b"], "--label:"),
        (["--id", "a b"], "--id"),
        (["--draft-tokens", "9"], "--draft-tokens"),
        (["--join", "studio"], "--join"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--host", "0.0.0.0"], "--token"),
        (["--join", "http://192.0.2.1:8000"], "--token"),
        (["--join", "http://192.0.2.1:8000", "--host", "127.0.0.1", "--token", "t"], "--host"),
    ],
)
def test_an_invalid_setting_is_named(arguments: list[str], name: str) -> None:
    with pytest.raises(InvalidSettings, match="(?s).*" + name):
        read_settings(arguments)


def test_invalid_settings_are_named_as_in_the_environment_or_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "paceline.yaml").write_text("worker: {prot: 9200}")
    monkeypatch.setenv("PACELINE_WORKER_DRAFT_TOKENS", "many")
    with pytest.raises(InvalidSettings) as invalid:
        read_settings([])
    assert "PACELINE_WORKER_DRAFT_TOKENS" in str(invalid.value)
    assert "'prot'" in str(invalid.value)


def test_the_token_comes_from_a_flag_or_the_environment_and_is_never_printed(monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_JOIN_TOKEN", "canary-1")
    for flags, token in (
        (["--host", "0.0.0.0"], "canary-1"),
        (["--token", "canary-2"], "canary-2"),
    ):
        settings = read_settings(flags)
        assert settings.token is not None
        assert settings.token.get_secret_value() == token
        assert "canary" not in repr(settings)
    with pytest.raises(InvalidSettings) as invalid:
        read_settings(["--token", "canary-3", "--port", "x"])
    assert "canary" not in str(invalid.value)


@pytest.mark.parametrize(
    ("hostname", "expected"),
    [
        ("studio.local", "studio"),
        ("Anna~s Mac Studio.fritz.box", "Anna-s-Mac-Studio"),
        ("", ""),
        ("x" * 80, "x" * 50),
    ],
)
def test_the_name_of_a_host_has_plain_letters(hostname: str, expected: str) -> None:
    assert name_of_host(hostname) == expected
    assert worker_report(f"{expected}9200", url="http://mac").worker_id == f"{expected}9200"


def test_a_wildcard_host_advertises_the_address_towards_the_gateway() -> None:
    assert advertised_url("0.0.0.0", 9200, "http://127.0.0.1:8000") == "http://127.0.0.1:9200"
    assert advertised_url("192.0.2.7", 9200, "http://192.0.2.1:80") == "http://192.0.2.7:9200"
    assert advertised_url("fd00::7", 9200, None) == "http://[fd00::7]:9200"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_is_loopback_recognises_local_hosts(host: str) -> None:
    assert is_loopback(host)
    assert not any(map(is_loopback, ("0.0.0.0", f"{host}.evil", "192.168.1.2")))


def test_l8_the_secret_of_the_prefix_cache_is_derived_from_the_join_token(state_dir: Path) -> None:
    (state_dir / "prefix-cache").mkdir(parents=True, mode=0o755)
    caches = [cache_of("--token", token) for token in ("a", "a", "b")]
    assert caches[0] == caches[1]
    assert caches[0][1] != caches[2][1]
    assert mode_of(state_dir / "prefix-cache") == 0o700, "others could read it"


def test_l8_a_worker_without_a_token_keeps_its_secret_in_the_state_folder(state_dir: Path) -> None:
    folder, secret = cache_of()
    assert (folder, secret) == cache_of()
    assert folder == state_dir / "prefix-cache"
    path = state_dir / "prefix-cache-secret"
    assert mode_of(path) == 0o600
    assert len(secret) == 64
    path.write_bytes(b"")
    assert cache_of() == (None, b"")
    assert cache_of("--prefix-cache-gb", "0") == (None, b"")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("name", ["prefix-cache", "."])
def test_l8_a_folder_that_others_may_write_leaves_memory_only(
    state_dir: Path, mode: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (state_dir / "prefix-cache").mkdir(parents=True, mode=0o700)
    (state_dir / name).chmod(mode)
    assert cache_of() == (None, b"")
    (message,) = caplog.messages
    assert message.startswith("prefix_cache.memory_only")
    assert message.endswith("reason=other users may write to it")


def test_a_state_folder_that_cannot_be_used_leaves_memory_only(state_dir, caplog) -> None:
    state_dir.touch()
    assert cache_of() == (None, b"")
    assert [message.split()[0] for message in caplog.messages] == ["prefix_cache.memory_only"]
