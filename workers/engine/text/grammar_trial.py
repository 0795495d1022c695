"""Compile a constraint in another process first: that takes as long as its client likes.

A schema of a few hundred characters may take llguidance hours and any memory, and nothing can stop
a thread. So another process compiles each constraint before the worker does, with limits on time
and memory, and ends at either: then the constraint is refused, and the next one gets a new process.
"""

import contextlib
import json
import logging
import math
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from paceline.request.constraint import Constraint, ConstraintKind
from workers.engine.text.grammar_source import (
    CALL_KINDS,
    Vocabulary,
    grammar_source,
    matcher_of,
    text_source,
)
from workers.engine.text.lark_text import UnsupportedGrammar
from workers.engine.text.schema_fault import fault_path

logger = logging.getLogger(__name__)

STACK_BYTES: Final = 256 << 20
"""The compiler recurses along references: a schema of 64 KiB may refer thousands of levels deep."""
_CPU_S: Final = 3
_WALL_S: Final = 20.0
_MEMORY_BYTES: Final = 96 << 20
_KEPT_BYTES: Final = 24 << 20
"""A process that has grown by more ends: an allocator keeps the most that was ever in use."""
_FORCED_BYTES: Final = 128 * 1024
"""More than any text that a constraint may contain; nobody forces more than that."""
_CHECK_S: Final = 0.01
_FIND_S: Final = 1.0
"""CPU time in which the place of a fault is looked for."""

_COMPLEX = "It is too complex."
UNSATISFIABLE = "No answer can satisfy the constraint."
# What llguidance's messages say, and what the client is told: its own text never leaves the worker.
_JSON_ERRORS = (
    (r'Unimplemented keys: \["([^"]{1,40})"', "The worker does not support the keyword '{}'."),
    (r"(oneOf)", "The worker supports '{}' only where no value fits two of its schemas."),
    (
        r"^min/maxProperties only",
        "The worker supports 'minProperties' and 'maxProperties' only where every one of the "
        "'properties' is required.",
    ),
    (
        r"^circular references with",
        "The worker supports no other keywords beside a '$ref' that refers to a schema around it.",
    ),
    (r"Unknown (format)", "The worker does not know this '{}'."),
    (r"(?:Expected .{1,80} for|invalid) '([^']{1,40})'", "The value of '{}' is invalid."),
    (r"(?i)invalid type\b", "The value of 'type' is invalid."),
    (r"^invalid multiple of", "The value of 'multipleOf' is invalid."),
    (r"^(\w{1,40}) must be an? ", "The value of '{}' is invalid."),
    (r"'(multipleOf)' has too many digits", "The worker does not support so long a '{}'."),
    (r"Pointer|Resource|Anchor|\$ref", "A '$ref' of the schema refers to no part of it."),
    (r"(?i)unsatisfiable", UNSATISFIABLE),
    (r"(?i)regex|look-?around", "The worker does not support this value of 'pattern'."),
)  # fmt: skip
_TOO_COMPLEX = re.compile(
    "(?i)too (large|many|complex|deep|big)|fuel|limit|exceeded|Unable to determine"
)


class Refusal(NamedTuple):
    """Why a constraint has no grammar, or is not compiled within the limits."""

    reason: str
    """For the client."""
    function: str = ""
    """The function whose own grammar is at fault, if one is."""
    path: Sequence[str | int] = ()
    """The place of the fault in the schema, or in those of the functions, by their names."""


class ConstraintTrial:
    """The process that tries constraints, started when one comes; for one thread at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def source(self, constraint: Constraint, call_marks: tuple[str, str] | None) -> str | Refusal:
        """Return llguidance's form of a constraint, if it compiles; blocks for some seconds."""
        process = self._process = self._process or self._start()
        answer: dict[str, Any] = {}
        function = ""
        timer = threading.Timer(_WALL_S, process.kill)
        timer.start()
        try:
            _send(process, [constraint.kind, constraint.value, call_marks])
            assert process.stdout is not None
            while "checked" in (line := json.loads(process.stdout.readline() or b"{}")):
                function = line["checked"]
            answer = line
        except (OSError, ValueError) as error:
            logger.warning("grammar.trial_failed", exc_info=error)
        finally:
            timer.cancel()
        if answer.pop("spent", True):
            self.close()
        if "source" in answer:
            return str(answer["source"])
        if not answer:
            logger.warning("grammar.trial_ended code=%s", process.wait())
        return Refusal(**{"reason": _COMPLEX, "function": function, **answer})

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes its pipes, and waits for it
                pass

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603  # our own program
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal of a worker is not for it
        )
        with contextlib.suppress(OSError):  # it ended: its first answer is missing
            _send(process, self._vocabulary)
        return process


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def main() -> None:
    """Answer each line with the source of a constraint, or with its fault."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = Vocabulary(*json.loads(sys.stdin.buffer.readline())).load()
    threading.stack_size(STACK_BYTES)
    began_bytes = _peak_bytes()
    for line in sys.stdin.buffer:
        kind, value, call_marks = json.loads(line)
        constraint = Constraint(ConstraintKind(kind), value, "")
        answer: dict[str, Any] = {}
        trial = threading.Thread(target=_try, args=(constraint, tokenizer, call_marks, answer))
        _, hard_s = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(process_time()) + _CPU_S, hard_s))
        trial.start()
        while trial.is_alive():
            trial.join(_CHECK_S)
            if _peak_bytes() > began_bytes + _MEMORY_BYTES:
                os._exit(os.EX_UNAVAILABLE)
        _write({**answer, "spent": _peak_bytes() > began_bytes + _KEPT_BYTES})


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _try(
    constraint: Constraint,
    tokenizer: LLTokenizer,
    call_marks: Sequence[str] | None,
    answer: dict[str, Any],
) -> None:
    grammars = constraint.value["grammars"] if constraint.kind in CALL_KINDS else ()
    for function in grammars:
        _write({"checked": function})  # to be blamed if this process ends meanwhile
        source = partial(text_source, constraint, function)
        if reason := _compile(constraint, source, tokenizer, "grammar")[1]:
            answer["reason"] = reason
            return
    _write({"checked": ""})
    found_s = process_time() + _FIND_S

    def reason_of(functions: Any) -> str:
        value = {**constraint.value, "functions": functions} if calls else functions
        one = constraint._replace(value=value)
        source = partial(grammar_source, one, tokenizer, call_marks)
        return _compile(one, source, tokenizer)[1] if process_time() < found_s else ""

    source = partial(grammar_source, constraint, tokenizer, call_marks)
    text, reason = _compile(constraint, source, tokenizer)
    answer |= {"reason": reason} if reason else {"source": text}
    calls = constraint.kind in CALL_KINDS
    if reason not in ("", _COMPLEX) and (calls or constraint.kind is ConstraintKind.JSON):
        schema = constraint.value["functions"] if calls else constraint.value
        answer["path"] = fault_path(schema, reason, reason_of, int(calls))


def _compile(
    constraint: Constraint, source: Callable[[], str], tokenizer: LLTokenizer, noun: str = ""
) -> tuple[str, str]:
    """Return llguidance's form of a constraint, or a fault for the client."""
    try:
        text = source()
        fault = _fault(matcher_of(text, tokenizer))
    except UnsupportedGrammar as error:
        return "", str(error)
    except Exception as error:  # noqa: BLE001  # any text of a client
        text, fault = "", str(error)
    return text, fault and explain(constraint, fault, noun)


def explain(constraint: Constraint, fault: str, noun: str = "") -> str:
    """Return the client's text for a fault in llguidance's words."""
    if not noun:
        of_schemas = constraint.kind in (ConstraintKind.JSON, *CALL_KINDS)
        of_expression = constraint.kind is ConstraintKind.REGEX
        noun = "schema" if of_schemas else "regular expression" if of_expression else "grammar"
    if noun == "schema":
        # Without the place in the grammar, and without the schema itself.
        fault = re.sub(r"(?s)^.*?JSON schema: |\n +\d+ \|.*", "", fault)
        for pattern, message in _JSON_ERRORS:
            if found := re.search(pattern, fault):
                return message.format(*found.groups())
    return _COMPLEX if _TOO_COMPLEX.search(fault) else f"The worker does not support this {noun}."


def _fault(matcher: LLMatcher) -> str:
    """Return the fault of a grammar at its beginning; empty without one."""
    if not matcher.is_error() and len(matcher.compute_ff_bytes()) > _FORCED_BYTES:
        return "too large"
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else ""


def _peak_bytes() -> int:
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux that begins with what the worker has, of which this process was a copy.
    status = Path("/proc/self/status").read_bytes()
    return int(status.partition(b"VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
