"""The cases of one client, as its program defines and runs them.

A program runs in the environment of its client, where nothing of the project is installed: this
module needs the standard library alone. The program passes its cases to `case`, calls `main`, and
prints a line of JSON for each case.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

URL = os.environ.get("BENCH_URL", "")
MODEL = os.environ.get("BENCH_MODEL", "")
CHECKPOINT = os.environ.get("BENCH_CHECKPOINT", "")
"""The model's folder, for clients that want its tokenizer."""
API = f"{URL}/v1"
KEY, LIMITED_KEY = os.environ.get("BENCH_KEY", "none"), os.environ.get("BENCH_LIMITED_KEY", "")
"""An API key, and one that has a single request a minute (of a scripted gateway)."""
COUNT = "Count from 1 to 20."
PERSON = "Tell me about a person."
WEATHER = "What is the weather in Paris?"
CALL = f"CALL the tools. {WEATHER}"
SLOWLY = "Answer SLOWLY."
HELLO = "Hello from the script."
"""Questions for which the scripted worker calls tools, and writes without an end; its answer."""
OVERFLOW = "word " * 40_000
"""More tokens than the context of the demo model, or of the scripted worker, holds."""
AT_ONCE = 8
_WAIT_S = 120.0


class Failed(Exception):
    """The client did not get what it asked for."""


class Mode(NamedTuple):
    """One way to run a case."""

    temperature: float
    stream: bool

    def __str__(self) -> str:
        return (
            f"{'sampled' if self.temperature else 'greedy'} {'stream' if self.stream else 'whole'}"
        )


WHOLE = (Mode(0, stream=False), Mode(1, stream=False))
STREAMED = (Mode(0, stream=True), Mode(1, stream=True))
BOTH = (*WHOLE, *STREAMED)
GREEDY = (WHOLE[0], STREAMED[0])

Run = Callable[[Mode], str]
Error = TypeVar("Error", bound=Exception)
_cases: list[tuple[str, tuple[Mode, ...], Run]] = []


def case(name: str, modes: tuple[Mode, ...] = BOTH) -> Callable[[Run], Run]:
    """Add a case: a function that returns a short result, or raises.

    It runs in each of the modes, and then eight times at once in these modes.
    """

    def add(run: Run) -> Run:
        _cases.append((name, modes, run))
        return run

    return add


def once(name: str, *arguments: object) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Add a case that runs once, with these arguments."""

    def add(run: Callable[..., str]) -> Callable[..., str]:
        _cases.append((name, WHOLE[:1], lambda _: run(*arguments)))
        return run

    return add


def leaves(name: str, close_early: Callable[[], object]) -> None:
    once(name)(lambda: leave(close_early))


def meets_limits(
    name: str,
    ask: Callable[[str, str], object],
    rate_limit: type[Exception],
    overflow: type[Exception],
    shown: Callable[[Any], object] = lambda error: type(error).__name__,
) -> None:
    """Add the case of a key beyond its limit, and of a prompt beyond the context.

    `ask` takes a question and a key.
    """

    def ask_twice() -> None:
        for _ in range(2):
            ask("Hi", LIMITED_KEY)

    @once(name)
    def limited() -> str:
        errors = expect(rate_limit, ask_twice), expect(overflow, lambda: ask(OVERFLOW, KEY))
        return ", ".join(str(shown(error)) for error in errors)


def main() -> None:
    # A shell ignores SIGINT in its background commands, whose clients would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, modes, run in _cases:
        outcomes = [(str(mode), *_attempt(run, mode)) for mode in modes]
        if len(modes) > 1:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                at_once = [modes[index % len(modes)] for index in range(AT_ONCE)]
                results = [*pool.map(partial(_attempt, run), at_once)]
            bad = [result for works, result in results if not works]
            outcomes.append((f"{AT_ONCE} at once", not bad, (bad or [results[0][1]])[0]))
        failures = [f"{label}: {result}" for label, works, result in outcomes if not works]
        line = {
            "case": name,
            "runs": [label for label, works, _ in outcomes if works],
            "works": not failures,
            "result": "; ".join(failures) or outcomes[0][2],
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def check(condition: object, message: object) -> None:
    if not condition:
        raise Failed(str(message)[:300])


def command(*words: str | Path, stdin: str = "", expected_codes: tuple[int, ...] = (0,)) -> str:
    """Run a command of the client's environment and return its output; raise `Failed`."""
    process = subprocess.run(
        [str(word) for word in words], input=stdin, capture_output=True, text=True, check=False
    )
    if process.returncode not in expected_codes:
        printed = (process.stdout + process.stderr).splitlines()
        lines = [line for raw in printed if (line := raw.strip(" │╭╰─╮╯"))]
        raise Failed(f"ended with {process.returncode}: {' / '.join(lines[-5:])[:400]}")
    return process.stdout or process.stderr


def get(path: str, **headers: str) -> str:
    headers["authorization"] = f"Bearer {KEY}"
    request = urllib.request.Request(URL + path, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(response.read().decode())


def requests_running() -> int:
    return int(json.loads(get("/v1/status"))["gateway"]["requests_in_flight"])


def clients_left() -> int:
    return int(json.loads(get("/v1/status"))["outcomes"].get("client_left", 0))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; raise `Failed` if it does not become so."""
    until_s = time.monotonic() + _WAIT_S
    while not condition():
        check(time.monotonic() < until_s, "the gateway does not see what the client did")
        time.sleep(0.1)


def expect(error: type[Error], run: Callable[[], object]) -> Error:
    """Run what must raise such an error, and return the error."""
    try:
        result = run()
    except error as raised:
        return raised
    raise Failed(f"no {error.__name__}: {result}")


def leave(run: Callable[[], object]) -> str:
    """Run a client that leaves its request; wait until the gateway has cancelled that."""
    left = clients_left()
    run()
    wait_until(lambda: clients_left() > left and not requests_running())
    return "the gateway cancelled the request at its worker"


def cancel(request: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Start a request, and cancel its task while it runs at the gateway."""

    async def start_and_cancel() -> None:
        task = asyncio.create_task(request())
        await asyncio.to_thread(wait_until, lambda: requests_running() > 0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(start_and_cancel())


def _attempt(run: Run, mode: Mode) -> tuple[bool, str]:
    try:
        return True, run(mode)
    except Exception as error:  # noqa: BLE001  # whatever the client raises is the result
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        return False, text if isinstance(error, Failed) else f"{type(error).__name__}: {text}"
