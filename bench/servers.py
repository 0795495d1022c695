"""One server at a time: started, waited for, weighed, and ended with all its children."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.blas import preload
from bench.contenders import Contender
from bench.venvs import PeerUnavailable, last_words

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that answers."""

    url: str
    model: str
    process_id: int

    def resident_bytes(self) -> int:
        """Add up the resident memory of the server and of all processes that it started."""
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=True
        )
        rows = [tuple(int(field) for field in line.split()) for line in listed.stdout.splitlines()]
        family = {self.process_id}
        while grown := {pid for pid, parent, _ in rows if parent in family} - family:
            family |= grown
        return sum(kib * 1024 for pid, _, kib in rows if pid in family)


@asynccontextmanager
async def running(
    contender: Contender, *, python: Path, model: Path, log: Path
) -> AsyncIterator[Server]:
    """Start a server in a home of its own, so that no earlier run has warmed its caches."""
    port = _free_port()
    arguments = [text.format(model=model, port=port) for text in contender.arguments]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as home, log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(python),
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home,
            env=_environment(home, ours=contender.venv is None),
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            name = await _until_it_answers(url, model, process, log)
            yield Server(url=url, model=name, process_id=process.pid)
        finally:
            await _end(process)


async def _until_it_answers(
    url: str, model: Path, process: asyncio.subprocess.Process, log: Path
) -> str:
    """Return the model's name once a one-token answer came."""
    try:
        async with (
            asyncio.timeout(START_TIMEOUT_S),
            httpx.AsyncClient(base_url=url, timeout=START_TIMEOUT_S) as client,
        ):
            while process.returncode is None:
                with suppress(httpx.TransportError):
                    return await _first_answer(client, model)
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise PeerUnavailable(f"no answer in {START_TIMEOUT_S:.0f} s: {last_words(log)}") from None
    raise PeerUnavailable(f"ended while starting: {last_words(log)}")


async def _first_answer(client: httpx.AsyncClient, model: Path) -> str:
    name = await _served_name(client, model)
    question = {"role": "user", "content": "Hello"}
    body = {"model": name, "messages": [question], "max_tokens": 1, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != httpx.codes.OK:
        raise PeerUnavailable(f"answers {answer.status_code}: {answer.text[:200]}")
    return name


async def _served_name(client: httpx.AsyncClient, model: Path) -> str:
    """Take the name that the server lists; some serve a folder under its path and list nothing."""
    listed = await client.get("/v1/models")
    try:
        names = [entry["id"] for entry in listed.json()["data"]]
    except (ValueError, KeyError):
        names = []
    return str(model) if str(model) in names or not names else str(names[0])


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):  # whatever is left of its session
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _environment(home: str, *, ours: bool) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    imports = {"PYTHONPATH": str(_ROOT)} if ours else {}
    return {**kept, **preload(), **imports, "HOME": home, "HF_HUB_OFFLINE": "1"}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
