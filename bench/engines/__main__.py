"""Real engines of other kinds behind a gateway: all wires, errors, aborts, and a mixed fleet.

`python -m bench.engines` makes a virtual environment for each engine (for llama.cpp it compiles its
server), starts one after another, lets a gateway find it out, and sends it the same requests. Then
four kinds under one model name serve 500 mixed requests at once, and one of two engines fails nine
of ten. `--record` writes the answers for `make test`. Engines that need macOS (LM Studio, oMLX) and
those that no registry has as a package (Ollama) are not among them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.engines.cases import WORD, Seen, chat, run_case, run_cases
from bench.engines.fleet import try_fleets
from bench.engines.llama_server import LLAMA_SERVERS, llama_server
from bench.engines.recorder import Recorder
from bench.engines.serving import READY_S, gateway_of, relayed
from bench.harness.contenders import PEERS, Contender
from bench.harness.servers import Server, running
from bench.harness.tables import MISSING, Grid, provenance, write_page
from bench.harness.venvs import PeerUnavailable, python_of
from gateway.config.static_workers import StaticWorker
from tests.support.running_gateway import RunningGateway, wait_until
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results" / "engines.md"
KEPT: Final = RESULTS.with_suffix(".json")
"""The last result of each engine, since they may run at different times."""
FLEET: Final = "fleet"
_ENGINES: Final = (*PEERS, *LLAMA_SERVERS)


@dataclass(kw_only=True)
class Engine:
    """One engine, and what was seen of it."""

    name: str
    version: str = ""
    measured: str = ""
    seen: list[Seen] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    """Why it could not be run, or what it did not do."""


def try_engine(contender: Contender, venvs: Path, *, record: bool) -> Engine:
    """Start one engine and run all cases against it."""
    engine = Engine(name=contender.name, measured=provenance())

    async def run() -> None:
        assert contender.venv is not None
        engine.version = contender.version
        program, model = python_of(contender.venv, venvs), CHECKPOINT
        if contender in LLAMA_SERVERS:
            program, model = llama_server(program, venvs)
        log = venvs / f"{contender.name}.engines.log"
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as servers:

            def start() -> Server:
                server = running(contender, python=program, model=model, log=log)
                started = servers.enter_async_context(server)
                return asyncio.run_coroutine_threadsafe(started, loop).result()

            await asyncio.to_thread(_try_server, engine, start, record)

    try:
        asyncio.run(run())
    except (PeerUnavailable, AssertionError) as reason:
        engine.failure = str(reason)
    return engine


def _try_server(engine: Engine, start: Callable[[], Server], record: bool) -> None:
    server = start()
    with (
        relayed(Recorder(server.url)) as (recorder, url),
        gateway_of(StaticWorker(id="engine", url=url)) as gateway,
    ):
        worker = gateway.status()["workers"]["engine"]
        model = server.model if server.model in worker["models"] else worker["models"][0]
        engine.facts["found out as"] = worker["kind"]
        engine.facts["models"] = str(len(worker["models"]))
        # The others read a prompt of any length, which takes minutes.
        refuses = engine.name.startswith(("mlx-vlm", "llama.cpp"))
        run_cases(gateway.client, model, engine.seen.append, long_prompts=refuses)
        recorder.recording = False
        engine.facts["after an abort"] = _abort(gateway, engine, model)
        engine.facts["40 at once"] = _overload(gateway, model)
        state = gateway.status()["workers"]["engine"]
        engine.facts["state after all"] = state["state"]
        engine.facts["told"] = _told(state)
        if record:
            path = recorder.write(
                re.sub(r"[-.]", "_", engine.name).replace("+", "_with_"),
                engine=engine.name.partition("+")[0],
                version=engine.version,
                source="recorded by python -m bench.engines --record",
                models=[model],
                tells=[name for name, count in state["unreported"].items() if not count],
            )
            engine.facts["recorded"] = path.name
        engine.facts["killed in a stream"] = _kill(gateway, engine, model, server.process_id)
        recorder.engine_url = start().url
        engine.facts["started again"] = _restarted(gateway, model)


def _endless(engine: Engine) -> dict[str, Any]:
    """Return the fields of a request whose answer lasts long enough to be left or cut."""
    if engine.name.startswith("llama.cpp"):  # its tiny model is quick, and ends its answers
        return {"max_tokens": 1500, "ignore_eos": True}
    return {"max_tokens": 400}


def _abort(gateway: RunningGateway, engine: Engine, model: str) -> str:
    """Leave a stream after its first event, and ask again."""
    body = chat(WORD, stream=True, **_endless(engine), temperature=0.9)
    with gateway.client.stream(
        "POST", "/v1/chat/completions", json={"model": model, **body}
    ) as one:
        next(one.iter_raw())
    began_s = time.monotonic()
    wait_until(lambda: gateway.status()["workers"]["engine"]["lanes"]["vlm"]["in_flight"] == 0)
    freed_s = time.monotonic() - began_s
    again = run_case(gateway.client, model, "chat")
    return f"slot free after {freed_s:.2f} s, next answer {again.status}"


def _kill(gateway: RunningGateway, engine: Engine, model: str, process_id: int) -> str:
    """Kill the engine while it writes a stream; return what the client and the next one see."""
    body = {"model": model, **chat(WORD, stream=True, **_endless(engine), temperature=1.5)}
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

    wait_until(is_gone, within_s=READY_S)
    gone = f"out of the fleet after {time.monotonic() - began_s:.1f} s"
    return f"{end}; {gone}, next answer {run_case(gateway.client, model, 'chat').status}"


def _restarted(gateway: RunningGateway, model: str) -> str:
    """Wait until an engine that was started again is in the fleet, and ask it."""
    began_s = time.monotonic()
    wait_until(
        lambda: str(gateway.status()["workers"]["engine"]["state"]) == "ready", within_s=READY_S
    )
    ready = f"in the fleet after {time.monotonic() - began_s:.1f} s"
    return f"{ready}, next answer {run_case(gateway.client, model, 'chat').status}"


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


def _grid(engines: Sequence[Engine]) -> Grid:
    cases = list(dict.fromkeys(seen.case for one in engines for seen in one.seen))
    rows = []
    for case in cases:
        cells = []
        for one in engines:
            found = next((seen for seen in one.seen if seen.case == case), None)
            cells.append(found.verdict.replace("|", "/") if found else MISSING)
        rows.append((case, *cells))
    facts = dict.fromkeys(name for one in engines for name in one.facts)
    rows += [(fact, *(one.facts.get(fact, MISSING) for one in engines)) for fact in facts]
    return Grid(
        title="One engine behind a gateway, as a client sees it",
        columns=("case", *(f"{one.name} ({one.version})" for one in engines)),
        rows=tuple(rows),
    )


def _kept() -> dict[str, Any]:
    return dict(json.loads(KEPT.read_text())) if KEPT.exists() else {}


def _write(name: str, result: dict[str, Any]) -> None:
    """Keep the result of an engine or of the fleets, and write the page of all."""
    kept = {**_kept(), name: result}
    KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    engines = [
        Engine(**{**kept[one.name], "seen": [Seen(**seen) for seen in kept[one.name]["seen"]]})
        for one in _ENGINES
        if one.name in kept
    ]
    about = "By `python -m bench.engines`; a schema needs Metal in mlx-vlm and vllm-mlx:\n\n"
    about += "\n".join(f"- {name}: {one['measured']}" for name, one in kept.items())
    failures = [f"{one.name}: {one.failure}" for one in engines if one.failure]
    texts = kept.get(FLEET, {}).get("texts", [])
    write_page(RESULTS, "Engines of other kinds", about, _grid(engines), *texts, *failures)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [*(one.name for one in _ENGINES), FLEET]
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    add = parser.add_argument
    add("--engines", default=",".join(names), help="comma-separated (default: all and the fleets)")
    add("--record", action="store_true", help="write the recordings that make test plays")
    add("--venv-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    options = parser.parse_args(arguments)
    chosen = options.engines.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    good = True
    for contender in _ENGINES:
        if contender.name not in chosen:
            continue
        console.print(f"{contender.name}, installed if it is missing")
        engine = try_engine(contender, options.venv_dir, record=options.record)
        for seen in engine.seen:
            console.print(f"  {seen.case}: {seen.verdict}")
        console.print(f"  {engine.facts} {engine.failure}")
        good &= not engine.failure and all(seen.status < 500 for seen in engine.seen)
        _write(contender.name, asdict(engine))
    if FLEET in chosen:
        found = asyncio.run(try_fleets(options.venv_dir))
        for text, answered in found:
            console.print(text)
            good &= answered
        _write(FLEET, {"measured": provenance(), "texts": [text for text, _ in found]})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
