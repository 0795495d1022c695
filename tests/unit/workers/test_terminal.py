"""Control characters in text for terminals and logs."""

from __future__ import annotations

import logging

import pytest

from workers.terminal import configure_logging, printable


def test_text_without_control_characters_stays_as_it_is() -> None:
    text = "".join(map(chr, range(0x20, 0x7F))) + "\t\nGrößer 千问 🦙"
    assert printable(text) == text


@pytest.mark.parametrize("character", ["\0", "\x1b", "\r", "\x7f", "\x9b", "\u202e", "\u2066"])
def test_c18_a_control_character_is_replaced(character: str) -> None:
    assert printable(f"a{character}b") == "a\ufffdb"


def test_c18_no_log_line_has_a_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        configure_logging(logging.WARNING, "%(message)s")
        try:
            raise ValueError("\x1b[2J")
        except ValueError:
            logging.getLogger("test").exception("model %s", "\x1b]0;owned\x07")
    finally:
        root.handlers = handlers
    logged = capsys.readouterr().err
    assert "model \ufffd]0;owned\ufffd" in logged
    assert "ValueError: \ufffd[2J" in logged
    assert "\x1b" not in logged
