"""Text for terminals and logs: no control characters, and sentences for people."""

import ast
import asyncio
import contextlib
import gc
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from paceline import terminal
from paceline.terminal import TERMINAL_VARIABLE, configure_logging, printable


@pytest.mark.parametrize("character", ["\0", "\x1b", "\r", "\x7f", "\x9b", "\u202e", "\u2066"])
def test_c18_a_control_character_is_replaced_and_all_other_text_stays(character: str) -> None:
    text = "".join(map(chr, range(0x20, 0x7F))) + "\t\nGrößer 千问 🦙"
    assert printable(f"{text}{character}b") == f"{text}\ufffdb"


def test_c18_no_log_line_has_a_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_configured(logging.WARNING):
        logging.getLogger("test").error(
            "model %s", "\x1b]0;owned\x07", exc_info=ValueError("\x1b[2J")
        )
    logged = capsys.readouterr().err
    assert "model \ufffd]0;owned\ufffd" in logged
    assert "\x1b" not in logged


def test_f82_a_fault_is_logged_by_type_and_place_without_its_words(capsys) -> None:
    words = "canary-words-of-a-person"

    def fail() -> None:
        try:
            int(words)
        except ValueError as error:
            raise ExceptionGroup(words, [KeyError(words), LookupError(words)]) from error

    async def break_off() -> None:
        fail()

    async def forget() -> None:
        await asyncio.wait((asyncio.create_task(break_off()),))

    with logging_configured(logging.INFO):
        try:
            fail()
        except ExceptionGroup as error:
            error.add_note(words)
            logging.getLogger("test").exception("request.broken request=%s", "r1")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        asyncio.run(forget())
        gc.collect()
    logged = capsys.readouterr().err
    for told in ("request.broken request=r1", "thread.died", "never retrieved", "in fail"):
        assert told in logged
    for kind in ("ValueError", "ExceptionGroup", "KeyError", "LookupError"):
        assert logged.count(kind) >= 3
    assert words not in logged


def test_f82_no_line_of_the_log_has_the_words_of_any_error_there_is() -> None:
    """What `except Exception` catches may quote a prompt; its type tells enough."""
    root = Path(__file__).parents[3]
    files = [
        file for name in ("gateway", "paceline", "workers") for file in (root / name).rglob("*.py")
    ]
    wrong = [
        f"{file.relative_to(root)}:{call.lineno}"
        for file in files
        for caught in ast.walk(ast.parse(file.read_text()))
        if isinstance(caught, ast.ExceptHandler) and caught.name
        if caught.type and ast.unparse(caught.type) in ("Exception", "BaseException")
        for call in ast.walk(caught)
        if isinstance(call, ast.Call) and re.match(r"log(ger)?\.", ast.unparse(call.func))
        if any(
            re.search(rf"(?<!type\(){caught.name}\b", ast.unparse(value)) for value in call.args[1:]
        )
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("level", "logged", "shown"),
    [
        (
            logging.WARNING,
            ("redis.degraded part=%s problem=%s", "keys", "Redis cannot be reached."),
            "Redis cannot be reached. This gateway continues by itself until this is fixed.",
        ),
        (
            logging.WARNING,
            ("worker.unreachable worker=%s: %s", "studio-2", "Allow its port 9200: a=b."),
            "This gateway cannot connect to studio-2. Allow its port 9200: a=b.",
        ),
        (
            logging.WARNING,
            ("%s: %s", "heartbeat.failed, retrying", "http://a:1 (10.0.0.1): status 503"),
            "The gateway gets no heartbeats from this worker, which retries: "
            "http://a:1 (10.0.0.1): status 503",
        ),
        (logging.INFO, ("mtp_head.tested %s", "MTP head healthy."), "MTP head healthy."),
        (logging.WARNING, ("odd.event_here n=%d", 3), "Odd event here: n=3"),
        (logging.WARNING, ("no event at %s", "all"), "no event at all"),
        (logging.INFO, ("odd.event_here n=%d", 3), None),
    ],
)
def test_a_terminal_shows_sentences_and_no_notes_for_machines(capsys, level, logged, shown) -> None:
    message, *values = logged
    with logging_configured(logging.INFO, **{TERMINAL_VARIABLE: "yes"}):
        logging.getLogger("test").log(level, message, *values, exc_info=ValueError("detail"))
    assert capsys.readouterr().err[10:] == (f"{shown}\n" if shown else "")


@contextlib.contextmanager
def logging_configured(level: int, **variables: str) -> Iterator[None]:
    root = logging.getLogger()
    handlers, root.handlers, level_before = root.handlers, [], root.level
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        configure_logging(level, "%(message)s")
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level_before)


def test_each_sentence_names_the_fields_of_its_log_line() -> None:
    """A sentence with another field would be shown in the words of a machine."""
    root = Path(__file__).parents[3]
    files = [
        file for name in ("gateway", "paceline", "workers") for file in (root / name).rglob("*.py")
    ]
    sources = "".join(file.read_text() for file in files)
    for event, sentence in terminal._SENTENCES.items():
        fields = {name for _, name, _, _ in Formatter().parse(sentence) if name} - {"text"}
        calls = re.findall(rf'"{re.escape(event)}\b([^"]*)"', sources)
        assert any(fields <= set(re.findall(r"(\w+)=%", call)) for call in calls), event
