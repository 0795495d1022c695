"""Real engines of other kinds behind a gateway: all wires, errors, aborts, and a mixed fleet.

`python -m bench.engines` makes a virtual environment for each engine (for llama.cpp it compiles its
server), starts one after another, lets a gateway find it out, and sends it the same requests. Then
four kinds under one model name serve 500 mixed requests at once, and one of two engines fails nine
of ten. `--record` writes the answers for `make test`. Engines that need macOS (LM Studio, oMLX) and
those that no registry has as a package (Ollama) are not among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.engines.cases import WORD, chat, run_case, run_cases
from bench.engines.fleet import try_fleets
from bench.engines.gateway import Gateway, gateway_of, relayed
from bench.engines.llama_server import LLAMA_SERVERS, llama_server
from bench.engines.recorder import Recorder
from bench.harness.contenders import PEERS
from bench.harness.options import parser
from bench.harness.servers import Contender, Server, running_engine
from bench.harness.tables import MISSING, RESULTS, Grid, provenance, show, write_page
from bench.harness.venvs import PeerUnavailable
from gateway.config.static_workers import StaticWorker
from workers.demo import CHECKPOINT

_KEPT: Final = RESULTS / "engines.json"
"""The last result of each engine, since they may run at different times."""
_FLEET: Final = "fleet"
_ENGINES: Final = (*PEERS, *LLAMA_SERVERS)


@dataclass(kw_only=True)
class Engine:
    """One engine, and what was seen of it."""

    name: str
    version: str = ""
    measured: str = field(default_factory=provenance)
    seen: dict[str, str] = field(default_factory=dict)
    """What a client sees of each case."""
    facts: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    """Why it could not be run, or what it did not do."""

    @property
    def good(self) -> bool:
        return not self.failure and not any(
            seen.startswith("FAILED") for seen in self.seen.values()
        )


def try_engine(contender: Contender, folder: Path, *, record: bool) -> Engine:
    engine = Engine(name=contender.name, version=contender.label)

    async def run() -> None:
        program, model = contender.python(folder), CHECKPOINT
        if contender in LLAMA_SERVERS:
            program, model = llama_server(program, folder)
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as servers:

            def start() -> Server:
                log = f"{contender.name}.engines"
                server = running_engine(contender, folder, model=model, log=log, program=program)
                started = servers.enter_async_context(server)
                return asyncio.run_coroutine_threadsafe(started, loop).result()

            server = await asyncio.to_thread(start)
            recorder, url = servers.enter_context(relayed(Recorder(server.url)))
            entry = StaticWorker(id="engine", url=url)
            gateway = await servers.enter_async_context(gateway_of(entry))
            trial = Trial(engine, gateway, server)
            await asyncio.to_thread(trial.run, recorder, start, record)

    try:
        asyncio.run(run())
    except (PeerUnavailable, AssertionError) as reason:
        engine.failure = str(reason)
    return engine


class Trial:
    """What is done to one engine behind a gateway."""

    def __init__(self, engine: Engine, gateway: Gateway, server: Server) -> None:
        self._engine = engine
        self._gateway = gateway
        self._server = server
        self._model = server.model
        # The tiny model of llama.cpp is quick, and ends its answers.
        tiny = {"max_tokens": 1500, "ignore_eos": True}
        self._endless = tiny if engine.name.startswith("llama.cpp") else {"max_tokens": 400}
        """Fields of a request whose answer lasts long enough to be left or cut."""

    def run(self, recorder: Recorder, start: Callable[[], Server], record: bool) -> None:
        engine, facts, gateway = self._engine, self._engine.facts, self._gateway
        gateway.wait_until_ready("engine")
        worker = gateway.workers()["engine"]
        if self._model not in worker["models"]:
            self._model = worker["models"][0]
        facts["found out as"] = worker["kind"]
        facts["models"] = str(len(worker["models"]))
        # The others read a prompt of any length, which takes minutes.
        refuses = engine.name.startswith(("mlx-vlm", "llama.cpp"))
        engine.seen = run_cases(gateway.client, self._model, long_prompts=refuses)
        recorder.recording = False
        facts["after an abort"] = self._abort()
        facts["40 at once"] = self._overload()
        state = gateway.workers()["engine"]
        unreported = state["unreported"]
        facts["state after all"] = state["state"]
        facts["told"] = ", ".join(
            f"{name} {'unknown' if count else 'told'}" for name, count in unreported.items()
        )
        if record:
            path = recorder.write(
                re.sub(r"[-.]", "_", engine.name).replace("+", "_with_"),
                engine=engine.name.partition("+")[0],
                version=engine.version,
                source="recorded by python -m bench.engines --record",
                models=[self._model],
                tells=[name for name, count in unreported.items() if not count],
            )
            facts["recorded"] = path.name
        facts["killed in a stream"] = self._kill()
        recorder.engine_url = start().url
        ready_s = gateway.wait_until_ready("engine")
        facts["started again"] = f"in the fleet after {ready_s:.1f} s, {self._next()}"

    def _next(self) -> str:
        return f"next answer {run_case(self._gateway.client, self._model, 'chat').status}"

    def _stream(self, temperature: float) -> Any:
        body = chat(WORD, stream=True, **self._endless, temperature=temperature)
        asked = {"model": self._model, **body}
        return self._gateway.client.stream("POST", "/v1/chat/completions", json=asked)

    def _abort(self) -> str:
        with self._stream(0.9) as one:
            next(one.iter_raw())
        freed_s = self._gateway.seconds_until(
            lambda found: found["engine"]["lanes"]["vlm"]["in_flight"] == 0
        )
        return f"slot free after {freed_s:.2f} s, {self._next()}"

    def _kill(self) -> str:
        """Kill the engine while it writes a stream; return what the client and the next see."""
        with self._stream(1.5) as stream:
            pieces = stream.iter_raw()
            text = next(pieces)
            os.killpg(self._server.process_id, signal.SIGKILL)
            text += b"".join(pieces)
        end = "an error event" if b'"error"' in text else "CUT without an error"
        if b"[DONE]" in text:
            end = "it had ended"
        gone_s = self._gateway.seconds_until(lambda found: found["engine"]["state"] == "gone")
        return f"{end}; out of the fleet after {gone_s:.1f} s, {self._next()}"

    def _overload(self) -> str:
        def ask(number: int) -> int:
            body = {"model": self._model, **chat(f"{WORD} ({number})", temperature=0)}
            return self._gateway.client.post("/v1/chat/completions", json=body).status_code

        with ThreadPoolExecutor(40) as executor:
            counts = Counter(executor.map(ask, range(40)))
        return ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))


def _grid(engines: Sequence[Engine]) -> Grid:
    lines = [{**one.seen, **one.facts} for one in engines]
    cases = dict.fromkeys(case for one in engines for case in one.seen)
    cases |= dict.fromkeys(fact for one in engines for fact in one.facts)
    rows = [
        (case, *(line.get(case, MISSING).replace("|", "/") for line in lines)) for case in cases
    ]
    columns = ("case", *(f"{one.name} ({one.version})" for one in engines))
    return Grid("One engine behind a gateway, as a client sees it", columns, rows)


def _write(name: str, result: dict[str, Any]) -> None:
    """Keep the result of an engine or of the fleets, and write the page of all."""
    kept = {**(json.loads(_KEPT.read_text()) if _KEPT.exists() else {}), name: result}
    _KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    engines = [Engine(**kept[one.name]) for one in _ENGINES if one.name in kept]
    about = "By `python -m bench.engines`; a schema needs Metal in mlx-vlm and vllm-mlx:\n\n"
    about += "\n".join(f"- {name}: {one['measured']}" for name, one in kept.items())
    failures = [f"{one.name}: {one.failure}" for one in engines if one.failure]
    texts = kept.get(_FLEET, {}).get("texts", [])
    title = "Engines of other kinds"
    write_page("engines.md", title, about, _grid(engines), *texts, *failures)


def main() -> int:
    names = [*(one.name for one in _ENGINES), _FLEET]
    made = parser("engines", __doc__, quick=False)
    made.add_argument("--engines", default=",".join(names), help="comma-separated (default: all)")
    made.add_argument("--record", action="store_true", help="write what make test plays")
    options = made.parse_args()
    chosen = options.engines.split(",")
    if unknown := set(chosen) - set(names):
        made.error(f"unknown: {', '.join(sorted(unknown))}")
    good = True
    for contender in _ENGINES:
        if contender.name not in chosen:
            continue
        show(f"{contender.name}, installed if it is missing")
        engine = try_engine(contender, options.folder, record=options.record)
        show(_grid([engine]), engine.failure)
        good &= engine.good
        _write(contender.name, asdict(engine))
    if _FLEET in chosen:
        found = asyncio.run(try_fleets(options.folder))
        show(*(text for text, _ in found))
        good &= all(answered for _, answered in found)
        _write(_FLEET, {"measured": provenance(), "texts": [text for text, _ in found]})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
