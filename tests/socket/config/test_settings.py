"""Settings: their sources, and what is wrong with them, told in plain words."""

import re
from pathlib import Path

import pytest

from gateway.config.settings import Settings, load_settings
from gateway.errors import StartupError
from paceline.settings import unknown_variables
from workers.settings import WorkerSettings

NO_HOST = "must be a host name such as paceline.example.com, without '*', scheme, port or path"
HOSTS = (
    "*",
    "*.example.com",
    "https://b.example",
    "b.example:8000",
    "b.example/v1",
    "",
    "bücher.de",
)
NO_ORIGIN = "never matches, because browsers omit the default port"
ORIGINS = ("https://app.example.com:443", "http://localhost:80")


def test_flags_override_environment_which_overrides_file_which_overrides_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paceline.yaml").write_text("host: 127.0.0.2\nport: 1\nidle_timeout_s: 5\n")
    monkeypatch.setenv("PACELINE_PORT", "2")
    monkeypatch.setenv("PACELINE_IDLE_TIMEOUT_S", "6")
    settings = load_settings(port=3, host=None)
    assert (settings.port, settings.idle_timeout_s, settings.host) == (3, 6, "127.0.0.2")
    assert settings.connect_timeout_s == Settings().connect_timeout_s


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("PACELINE_PORT", "a-secret-by-mistake", "it must be a whole number"),
        ("PACELINE_PORT", "99999", "it must be at most 65535"),
        ("PACELINE_IDLE_TIMEOUT_S", "x", "it must be a number"),
        ("PACELINE_TRACES", "on", "it must be 'off' or 'otlp'"),
        *(("PACELINE_ALLOWED_HOSTS", f"a.example,{host}", f"'{host}' {NO_HOST}") for host in HOSTS),
        *(("PACELINE_ALLOWED_ORIGINS", one, f"'{one}' {NO_ORIGIN}") for one in ORIGINS),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(monkeypatch, name, value, problem) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as wrong:
        load_settings()
    assert str(wrong.value) == f"Invalid settings: {name}: {problem}."


def test_a_variable_that_nothing_replaces_is_no_secret(tmp_path, monkeypatch) -> None:
    file = tmp_path / "paceline.yaml"
    for text, path in (
        ("api_key: ${TEAM_KEY}", "api_key"),
        ("api_key: $TEAM_KEY", "api_key"),
        ("state_dir: $HOME/paceline", "state_dir"),
        ("redis_url: redis://:${PASSWORD:-x}@host:6379/0", "redis_url"),
        ("worker: {model: '${MODEL}'}", "worker.model"),
    ):
        file.write_text(text)
        with pytest.raises(StartupError, match=f"'{path}' in the .* names a variable") as wrong:
            load_settings(file)
        assert "TEAM_KEY" not in str(wrong.value)
    file.write_text("api_key: a$b${-$9\n")
    assert load_settings(file).api_key is not None
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "${SECRET}")
    with pytest.raises(StartupError, match="PACELINE_ADMIN_KEY names a variable"):
        load_settings(file)


def test_a_variable_that_is_no_setting_is_told_with_the_one_that_was_probably_meant(
    monkeypatch,
) -> None:
    for name in (
        *("PACELINE_PROT", "PACELINE_ZZZ", "PACELINE_STUDIO_API_KEY", "PACELINE_CONFIG"),
        *("PACELINE_WORKER_MODLE", "PACELINE_WORKER_MODEL", "PACELINE_PORT", "OTHER_PROT"),
    ):
        monkeypatch.setenv(name, "1")
    assert unknown_variables(Settings) == [
        "PACELINE_PROT is not a setting, did you mean PACELINE_PORT?",
        "PACELINE_ZZZ is not a setting, and it has no effect.",
    ]
    assert unknown_variables(WorkerSettings) == [
        "PACELINE_WORKER_MODLE is not a setting, did you mean PACELINE_WORKER_MODEL?"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "'prot' in the configuration file: unknown setting, did you mean 'port'?"),
        ("port: many", "'port' in the configuration file: "),
        ("- a", "is not a YAML mapping"),
        ("a: [", "is not a YAML mapping"),
        ("1: 2", "is not a YAML mapping"),
        (None, "does not exist"),
    ],
)
def test_an_invalid_settings_file_is_named_with_its_field(tmp_path, text, message) -> None:
    file = tmp_path / "other.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(StartupError, match=re.escape(message)):
        load_settings(file)
