"""Settings: their sources, and what is wrong with them, told in plain words."""

import re
from pathlib import Path

import pytest

from gateway.config.settings import Settings, load_settings
from gateway.errors import StartupError
from paceline.settings import unknown_variables
from workers.settings import WorkerSettings


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
    ],
)
def test_a_wrong_value_is_told_in_plain_words(monkeypatch, name, value, problem) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as wrong:
        load_settings()
    assert str(wrong.value) == f"Invalid settings: {name}: {problem}."


def test_a_variable_that_is_no_setting_is_told_with_the_one_that_was_probably_meant(
    monkeypatch,
) -> None:
    for name in (
        *("PACELINE_PROT", "PACELINE_ZZZ", "PACELINE_STUDIO_API_KEY", "PACELINE_CONFIG"),
        *("PACELINE_WORKER_MODLE", "PACELINE_WORKER_MODEL", "PACELINE_PORT", "OTHER_PROT"),
    ):
        monkeypatch.setenv(name, "1")
    assert unknown_variables(Settings) == [
        "PACELINE_PROT is no setting, did you mean PACELINE_PORT?",
        "PACELINE_ZZZ is no setting, and it has no effect.",
    ]
    assert unknown_variables(WorkerSettings) == [
        "PACELINE_WORKER_MODLE is no setting, did you mean PACELINE_WORKER_MODEL?"
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
