"""Settings that cannot work are told in plain words, as the user wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.settings import load_settings
from gateway.errors import StartupError


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("PACELINE_PORT", "x", "it must be a whole number"),
        ("PACELINE_PORT", "99999", "it must be at most 65535"),
        ("PACELINE_IDLE_TIMEOUT_S", "x", "it must be a number"),
        ("PACELINE_TRACES", "on", "it must be 'off' or 'otlp'"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as wrong:
        load_settings()
    assert str(wrong.value) == f"Invalid settings: {name}: {problem}."


def test_a_mistyped_setting_is_told_its_name(tmp_path: Path) -> None:
    file = tmp_path / "paceline.yaml"
    file.write_text("prot: 8000")
    with pytest.raises(StartupError) as wrong:
        load_settings(file)
    assert str(wrong.value).endswith("unknown setting, did you mean 'port'?")
