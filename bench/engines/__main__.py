"""Real engines of other kinds behind a gateway: all wires, errors, aborts, and a mixed fleet.

`python -m bench.engines` makes a virtual environment for each engine, starts one after another on
the demo checkpoint, lets a gateway find it out, and sends it the same requests. Then a fleet of all
of them under one model name serves 500 mixed requests at once. `--record` writes the answers for
`make test`. Engines that need macOS (LM Studio, oMLX) and those that no registry has as a package
(Ollama) are not among them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import yaml
from rich.console import Console

from bench.engines.cases import WORD, Seen, chat, picture, run_case, run_cases
from bench.engines.recorder import Recorder
from bench.harness.contenders import PEERS, Contender
from bench.harness.servers import Server, running
from bench.harness.tables import Grid, provenance, write_page
from bench.harness.venvs import PeerUnavailable, python_of
from gateway.config.static_workers import StaticWorker
from policies.document import default_text
from tests.support.running_gateway import RunningGateway, make_settings, running_server, wait_until
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results" / "engines.md"
_KINDS: Final = {
    "mlx-lm": "mlx-lm",
    "mlx-vlm": "mlx-vlm",
    "mlx-vlm+mtp": "mlx-vlm",
    "vllm-mlx": "vllm-mlx",
    "vllm-mlx+mtp": "vllm-mlx",
    "paceline": "paceline",
}
_ENGINES: Final = tuple(one for one in PEERS if one.name in _KINDS)
_FLEET: Final = ("mlx-lm", "mlx-vlm", "vllm-mlx", "mlx-vlm+mtp")
_READY_S: Final = 180.0
_REQUESTS: Final = 500


@dataclass
class Engine:
    """One engine, and what was seen of it."""

    contender: Contender
    version: str = ""
    seen: list[Seen] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def recorder_of(url: str) -> Iterator[tuple[Recorder, str]]:
    """Run a recorder in front of an engine; return it and its URL."""
    recorder = Recorder(url)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    with running_server(recorder, sockets=[listener]):
        yield recorder, f"http://127.0.0.1:{listener.getsockname()[1]}"


def _patient_policy() -> str:
    """Return the shipped policy with queues for all requests of a run at once."""
    document = yaml.safe_load(default_text())
    for pool in document["pools"].values():
        pool["queue"] = {"limit": 2 * _REQUESTS, "timeout_s": 900}
    return yaml.safe_dump(document)


@contextlib.contextmanager
def gateway_of(*entries: StaticWorker, **settings: Any) -> Iterator[RunningGateway]:
    """Run a gateway whose workers are these engines, once all of them are ready."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(_patient_policy())
        made = make_settings(Path(folder), workers=entries, policy=policy, **settings)
        with RunningGateway(made) as gateway:
            gateway.client.timeout = httpx.Timeout(600)

            def ready() -> bool:
                found = gateway.status()["workers"]
                return len(found) == len(entries) and all(
                    one["state"] == "ready" for one in found.values()
                )

            wait_until(ready, within_s=_READY_S)
            yield gateway


async def try_engine(engine: Engine, python: Path, log: Path, *, record: bool) -> None:
    """Start one engine and run all cases against it."""
    async with running(engine.contender, python=python, model=CHECKPOINT, log=log) as server:
        await asyncio.to_thread(_try_server, engine, server, record)


def _try_server(engine: Engine, server: Server, record: bool) -> None:
    with (
        recorder_of(server.url) as (recorder, url),
        gateway_of(StaticWorker(id="engine", url=url)) as gateway,
    ):
        worker = gateway.status()["workers"]["engine"]
        model = server.model if server.model in worker["models"] else worker["models"][0]
        engine.facts["found out as"] = worker["kind"]
        engine.facts["models"] = str(len(worker["models"]))
        # The others read a prompt of any length, which takes minutes.
        refuses = engine.contender.name.startswith("mlx-vlm")
        run_cases(gateway.client, model, engine.seen.append, long_prompts=refuses)
        recorder.recording = False
        engine.facts["after an abort"] = _abort(gateway, model)
        engine.facts["40 at once"] = _overload(gateway, model)
        state = gateway.status()["workers"]["engine"]
        engine.facts["state after all"] = state["state"]
        engine.facts["told"] = _told(state)
        if record:
            path = recorder.write(
                engine.contender.name.replace("-", "_").replace("+", "_with_"),
                engine=_KINDS[engine.contender.name],
                version=engine.version,
                source="recorded by python -m bench.engines --record",
                models=[model],
                tells=[name for name, count in state["unreported"].items() if not count],
            )
            engine.facts["recorded"] = path.name
        engine.facts["killed in a stream"] = _kill(gateway, model, server.process_id)


def _abort(gateway: RunningGateway, model: str) -> str:
    """Leave a stream after its first event, and ask again."""
    body = chat(WORD, stream=True, max_tokens=400, temperature=0.9)
    with gateway.client.stream(
        "POST", "/v1/chat/completions", json={"model": model, **body}
    ) as one:
        next(one.iter_raw())
    began_s = time.monotonic()
    wait_until(lambda: gateway.status()["workers"]["engine"]["lanes"]["vlm"]["in_flight"] == 0)
    freed_s = time.monotonic() - began_s
    again = run_case(gateway.client, model, "chat")
    return f"slot free after {freed_s:.2f} s, next answer {again.status}"


def _kill(gateway: RunningGateway, model: str, process_id: int) -> str:
    """Kill the engine while it writes a stream; return what the client and the next one see."""
    body = {"model": model, **chat(WORD, stream=True, max_tokens=400, temperature=1.5)}
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        pieces = stream.iter_raw()
        text = next(pieces)
        os.killpg(process_id, signal.SIGKILL)
        text += b"".join(pieces)
    if b"[DONE]" in text:
        end = "it had ended"
    else:
        end = "an error event" if b'"error"' in text else "CUT without an error"
    began_s = time.monotonic()

    def is_gone() -> bool:
        return str(gateway.status()["workers"]["engine"]["state"]) == "gone"

    wait_until(is_gone, within_s=_READY_S)
    gone = f"out of the fleet after {time.monotonic() - began_s:.1f} s"
    return f"{end}; {gone}, next answer {run_case(gateway.client, model, 'chat').status}"


def _overload(gateway: RunningGateway, model: str) -> str:
    def ask(number: int) -> int:
        body = {"model": model, **chat(f"{WORD} ({number})", temperature=0)}
        return gateway.client.post("/v1/chat/completions", json=body).status_code

    with ThreadPoolExecutor(40) as executor:
        counts = Counter(executor.map(ask, range(40)))
    return ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))


def _told(state: dict[str, Any]) -> str:
    unreported = state["unreported"]
    return ", ".join(
        f"{name} {'unknown' if count else 'told'}" for name, count in unreported.items()
    )


def _mixed_bodies(model: str, count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of several kinds, in a random order."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        text = f"{WORD} ({number})"
        kinds: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/v1/chat/completions", chat(text, temperature=0)),
            ("/v1/chat/completions", chat(text, temperature=0.7, stream=True)),
            ("/v1/chat/completions", chat(picture(), temperature=0)),
            ("/v1/completions", {"prompt": text, "max_tokens": 8}),
            ("/v1/messages", chat(text, stream=True)),
        )
        path, body = kinds[rng.randrange(len(kinds))]
        made.append((path, {"model": model, **body}))
    return made


@contextlib.asynccontextmanager
async def fleet(pythons: dict[str, Path], logs: Path) -> AsyncIterator[list[StaticWorker]]:
    """Start several engines at a time; all serve one model name."""
    entries = []
    async with contextlib.AsyncExitStack() as stack:
        for engine in _ENGINES:
            if engine.name not in _FLEET or engine.name not in pythons:
                continue
            server = await stack.enter_async_context(
                running(
                    engine,
                    python=pythons[engine.name],
                    model=CHECKPOINT,
                    log=logs / f"{engine.name}.fleet.log",
                )
            )
            models = {"fleet-demo": server.model}
            entries.append(
                StaticWorker(id=engine.name.replace("+", "-with-"), url=server.url, models=models)
            )
        yield entries


def _try_fleet(entries: Sequence[StaticWorker]) -> tuple[str, Counter[str]]:
    with gateway_of(*entries) as gateway:
        bodies = _mixed_bodies("fleet-demo", _REQUESTS, seed=26)
        barrier = threading.Barrier(_REQUESTS)
        limits = httpx.Limits(max_connections=None)
        client = httpx.Client(base_url=gateway.url, timeout=1800, limits=limits, trust_env=False)

        def ask(one: tuple[str, dict[str, Any]]) -> str:
            path, body = one
            barrier.wait(timeout=_READY_S)
            response = client.post(path, json=body)
            ended = not body.get("stream") or any(
                end in response.text for end in ("[DONE]", "message_stop")
            )
            if response.status_code != 200:
                return f"{response.status_code} {response.text[:120]}"
            return "ok" if ended else "cut"

        began_s = time.monotonic()
        with client, ThreadPoolExecutor(_REQUESTS) as executor:
            results = Counter(executor.map(ask, bodies))
        took_s = time.monotonic() - began_s
        status = gateway.status()
        shares = {name: one["recent"]["requests"] for name, one in status["workers"].items()}
    failures = {text: count for text, count in results.items() if text != "ok"}
    text = (
        f"{_REQUESTS} mixed requests at once to {len(entries)} engines under one name in "
        f"{took_s:.0f} s: {results['ok']} answered, {_REQUESTS - results['ok']} failed "
        f"({failures or 'none'}); by engine: {shares}."
    )
    return text, results


def _grid(engines: Sequence[Engine]) -> Grid:
    cases = list(dict.fromkeys(seen.case for one in engines for seen in one.seen))
    rows = []
    for case in cases:
        cells = []
        for one in engines:
            found = next((seen for seen in one.seen if seen.case == case), None)
            cells.append(found.verdict.replace("|", "/") if found else "-")
        rows.append((case, *cells))
    facts = dict.fromkeys(name for one in engines for name in one.facts)
    rows += [(fact, *(one.facts.get(fact, "-") for one in engines)) for fact in facts]
    names = [f"{one.contender.name} ({one.version})" for one in engines]
    return Grid(
        title="One engine behind a gateway, as a client sees it",
        columns=("case", *names),
        rows=tuple(rows),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    names = [one.name for one in _ENGINES]
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    add = parser.add_argument
    add("--engines", default=",".join(names), help="comma-separated (default: all)")
    add("--record", action="store_true", help="write the recordings that make test plays")
    add("--no-fleet", action="store_true", help="leave out the mixed fleet")
    add("--write", action="store_true", help=f"write {RESULTS.name} though only some run")
    add("--venv-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    options = parser.parse_args(arguments)
    chosen = options.engines.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    engines, pythons, failures = [], {}, []
    for contender in _ENGINES:
        if contender.name not in chosen or contender.venv is None:
            continue
        engine = Engine(contender, version=contender.venv.pins[0].replace("==", " "))
        console.print(f"{contender.name}, installed if it is missing")
        try:
            pythons[contender.name] = python_of(contender.venv, options.venv_dir)
            log = options.venv_dir / f"{contender.name}.engines.log"
            asyncio.run(try_engine(engine, pythons[contender.name], log, record=options.record))
        except (PeerUnavailable, AssertionError) as reason:
            failures.append(f"{contender.name}: {reason}")
        engines.append(engine)
        for seen in engine.seen:
            console.print(f"  {seen.case}: {seen.verdict}")
        console.print(f"  {engine.facts}")
    fleet_text, results = "", Counter[str]()
    if not options.no_fleet:

        async def run_fleet() -> tuple[str, Counter[str]]:
            async with fleet(pythons, options.venv_dir) as entries:
                return await asyncio.to_thread(_try_fleet, entries)

        fleet_text, results = asyncio.run(run_fleet())
        console.print(fleet_text)
    failed = [seen for one in engines for seen in one.seen if seen.status >= 500]
    if options.write or set(chosen) == set(names):
        about = f"Measured {provenance()}, demo checkpoint, by `python -m bench.engines`."
        write_page(RESULTS, "Engines of other kinds", about, _grid(engines), fleet_text, *failures)
    return 1 if failed or failures or set(results) - {"ok"} else 0


if __name__ == "__main__":
    sys.exit(main())
