"""One server at a time: started, polled until ready, and stopped with all its children."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.harness.blas import preload
from bench.harness.contenders import Contender
from bench.harness.process_cost import resident_bytes
from bench.harness.processes import end, free_port, inherited, start
from bench.harness.venvs import PeerUnavailable, last_line

START_TIMEOUT_S = 300.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A ready server."""

    url: str
    model: str
    process_id: int

    def resident_bytes(self) -> int:
        """Return the resident memory of the server and its children."""
        return resident_bytes(self.process_id)


@asynccontextmanager
async def running(
    contender: Contender,
    *,
    python: Path,
    model: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Server]:
    """Start a server with a new home folder, so that no earlier run has filled its caches."""
    port = free_port()
    arguments = [text.format(model=model, port=port) for text in contender.arguments]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as home, log.open("wb") as output:
        process = await start(
            str(python),
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home,
            env={**_environment(home, ours=contender.venv is None), **(environment or {})},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            name = await _wait_until_ready(url, model, process, log)
            yield Server(url=url, model=name, process_id=process.pid)
        finally:
            await end(process)


async def _wait_until_ready(
    url: str, model: Path, process: asyncio.subprocess.Process, log: Path
) -> str:
    """Return the name of the model after a first answer of one token."""
    try:
        async with (
            asyncio.timeout(START_TIMEOUT_S),
            httpx.AsyncClient(base_url=url, timeout=START_TIMEOUT_S) as client,
        ):
            while process.returncode is None:
                with suppress(httpx.TransportError):
                    if name := await _first_answer(client, model):
                        return name
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise PeerUnavailable(f"no answer in {START_TIMEOUT_S:.0f} s: {last_line(log)}") from None
    raise PeerUnavailable(f"ended while starting: {last_line(log)}")


async def _first_answer(client: httpx.AsyncClient, model: Path) -> str:
    """Return the name of the model once it has answered; empty while the server loads it."""
    name = await _served_name(client, model)
    question = {"role": "user", "content": "Hello"}
    body = {"model": name, "messages": [question], "max_tokens": 1, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return ""
    if answer.status_code != httpx.codes.OK:
        raise PeerUnavailable(f"answers {answer.status_code}: {answer.text[:200]}")
    return name


async def _served_name(client: httpx.AsyncClient, model: Path) -> str:
    """Return the name that the server lists; without a list, the path of the folder."""
    response = await client.get("/v1/models")
    try:
        names = [entry["id"] for entry in response.json()["data"]]
    except (ValueError, KeyError):
        names = []
    return str(model) if str(model) in names or not names else str(names[0])


def _environment(home: str, *, ours: bool) -> dict[str, str]:
    imports = {"PYTHONPATH": str(_ROOT)} if ours else {}
    return {**inherited(), **preload(), **imports, "HOME": home, "HF_HUB_OFFLINE": "1"}
