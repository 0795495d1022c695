"""Servers to compare: our worker or gateway, and their peers, each started until it is ready."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from bench.harness.blas import preload
from bench.harness.process_cost import resident_bytes
from bench.harness.processes import end, free_port, inherited, start
from bench.harness.venvs import PeerUnavailable, Venv, last_line, python_of
from workers.demo import CHECKPOINT

ROOT: Final = Path(__file__).parents[2]
_START_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One server in one mode."""

    name: str
    pins: tuple[str, ...] = ()
    """The packages of its environment; none: this project, in the interpreter that runs this."""
    command: str
    """Its words; {python}, {bin}, {home}, {port} and what else its benchmark has are replaced."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of its home, in which the same is replaced."""
    mtp: bool = False
    environment: str = ""
    """The name of its environment, if others share that."""
    version: str = ""
    """The package that brings it, and its version."""

    @property
    def label(self) -> str:
        return self.version or (self.pins[0].replace("==", " ") if self.pins else "")

    def python(self, folder: Path) -> Path:
        """Return its interpreter; raise `PeerUnavailable` if it cannot be installed."""
        if not self.pins:
            return Path(sys.executable)
        return python_of(Venv(name=self.environment or self.name, pins=self.pins), folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A ready server."""

    name: str
    url: str
    model: str
    port: int
    process_id: int

    def resident_bytes(self) -> int:
        return resident_bytes(self.process_id)


@asynccontextmanager
async def running(
    contender: Contender,
    folder: Path,
    *,
    model: Path | str,
    log: str,
    port: int = 0,
    key: str = "none",
    environment: Mapping[str, str],
    **places: object,
) -> AsyncIterator[Server]:
    """Start a server with a new home folder, so that no earlier run has filled its caches."""
    python = contender.python(folder)
    port = port or free_port()
    written = folder / f"{log}.log"
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as home,
        written.open("wb") as output,
    ):
        places |= {"python": python, "bin": python.parent, "home": home, "port": port}
        places |= {"model": model, "free_port": free_port()}
        for name, text in contender.files.items():
            Path(home, name).write_text(text.format(**places))  # noqa: ASYNC240
        own = {"PYTHONPATH": str(ROOT)} if not contender.pins else {}
        process = await start(
            *(word.format(**places) for word in contender.command.split()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home,
            env={**inherited(), **own, "HOME": home, "PACELINE_STATE_DIR": home, **environment},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            name = await _wait_until_ready(url, model, key, process, written)
            yield Server(
                name=contender.name, url=url, model=name, port=port, process_id=process.pid
            )
        finally:
            await end(process)


def running_engine(
    contender: Contender,
    folder: Path,
    *,
    model: Path = CHECKPOINT,
    log: str = "",
    environment: Mapping[str, str] | None = None,
    **places: Any,
) -> AbstractAsyncContextManager[Server]:
    """Start an engine with the BLAS that all engines get."""
    return running(
        contender,
        folder,
        model=model,
        log=log or contender.name,
        environment={**preload(), "HF_HUB_OFFLINE": "1", **(environment or {})},
        **places,
    )


async def _wait_until_ready(
    url: str, model: Path | str, key: str, process: asyncio.subprocess.Process, log: Path
) -> str:
    """Return the name of the model after a first answer of one token."""
    headers = {"authorization": f"Bearer {key}"}
    last = "no answer"
    try:
        async with (
            asyncio.timeout(_START_TIMEOUT_S),
            httpx.AsyncClient(base_url=url, timeout=_START_TIMEOUT_S, headers=headers) as client,
        ):
            while process.returncode is None:
                with suppress(httpx.TransportError):
                    name = await _served_name(client, str(model))
                    question = [{"role": "user", "content": "Hello"}]
                    body = {"model": name, "messages": question, "max_tokens": 1, "temperature": 0}
                    answer = await client.post("/v1/chat/completions", json=body)
                    if answer.status_code == httpx.codes.OK:
                        return name
                    last = f"answers {answer.status_code}: {answer.text[:200]}"
                await asyncio.sleep(0.2)
    except TimeoutError:
        reason = f"not ready in {_START_TIMEOUT_S:.0f} s, {last}: {last_line(log)}"
        raise PeerUnavailable(reason) from None
    raise PeerUnavailable(f"ended while starting, {last}: {last_line(log)}")


async def _served_name(client: httpx.AsyncClient, model: str) -> str:
    """Return the name that the server lists; without a list, the given one."""
    response = await client.get("/v1/models")
    try:
        names = [entry["id"] for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        names = []
    return model if model in names or not names else str(names[0])
