"""Compile a constraint in another process first: that takes as long as its client likes.

A schema of a few hundred characters may take llguidance hours and any memory, and nothing can stop
a thread. So another process compiles each constraint before the worker does, with limits on time
and memory, and ends at either: then the constraint is refused, and the next one gets a new process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
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

logger = logging.getLogger(__name__)

STACK_BYTES: Final = 256 << 20
"""The compiler recurses along references: a schema of 64 KiB may refer thousands of levels deep."""
_CPU_S: Final = 3
_WALL_S: Final = 20.0
_MEMORY_BYTES: Final = 96 << 20
_FORCED_BYTES: Final = 128 * 1024
"""More than any text that a constraint may contain; nobody forces more than that."""
_CHECK_S: Final = 0.01
_PEAK_UNIT: Final = 1 if sys.platform == "darwin" else 1024


class Refusal(NamedTuple):
    """Why a constraint has no grammar, or is not compiled within the limits."""

    reason: str
    told: bool = False
    """Whether the reason is for the client; else it is llguidance's."""
    function: str = ""
    """The function whose own grammar is at fault, if one is."""


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
        if "source" in answer:
            return str(answer["source"])
        if not answer:
            self.close()
            logger.warning("grammar.trial_ended code=%s", process.wait())
        return Refusal(**{"reason": "too complex", "function": function, **answer})

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes its pipes, and waits for it
                pass

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603  # our own program
            [sys.executable, "-m", __name__],
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
    """Answer each line with the source of a constraint, or with what is wrong with it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = Vocabulary(*json.loads(sys.stdin.buffer.readline())).load()
    threading.stack_size(STACK_BYTES)
    for line in sys.stdin.buffer:
        kind, value, call_marks = json.loads(line)
        constraint = Constraint(ConstraintKind(kind), value, "")
        answer: dict[str, Any] = {}
        trial = threading.Thread(target=_try, args=(constraint, tokenizer, call_marks, answer))
        _, hard_s = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(process_time()) + _CPU_S, hard_s))
        limit_bytes = _peak_bytes() + _MEMORY_BYTES
        trial.start()
        while trial.is_alive():
            trial.join(_CHECK_S)
            if _peak_bytes() > limit_bytes:
                os._exit(os.EX_UNAVAILABLE)
        _write(answer)


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _try(
    constraint: Constraint,
    tokenizer: LLTokenizer,
    call_marks: Sequence[str] | None,
    answer: dict[str, Any],
) -> None:
    texts = constraint.value["grammars"] if constraint.kind in CALL_KINDS else ()
    try:
        for function in texts:
            _write({"checked": function})  # to be blamed if this process ends meanwhile
            if fault := _fault(matcher_of(text_source(constraint, function), tokenizer)):
                answer["reason"] = fault
                return
        _write({"checked": ""})
        source = grammar_source(constraint, tokenizer, call_marks)
        fault = _fault(matcher_of(source, tokenizer))
        answer |= {"reason": fault} if fault else {"source": source}
    except UnsupportedGrammar as error:
        answer |= {"reason": str(error), "told": True}
    except Exception as error:  # noqa: BLE001  # any text of a client
        answer["reason"] = str(error)


def _fault(matcher: LLMatcher) -> str:
    """Return what is wrong with a grammar at its beginning; empty if nothing is."""
    if not matcher.is_error() and len(matcher.compute_ff_bytes()) > _FORCED_BYTES:
        return "too large"
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else ""


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT


if __name__ == "__main__":
    main()
