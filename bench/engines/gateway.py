"""A gateway of engines in a process of its own, and relays in front of them."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import yaml

from bench.engines.recorder import Recorder
from bench.harness.parts import AS_ADMIN, fixed_port, gateway_part, wait_until_up
from gateway.config.static_workers import StaticWorker
from policies.document import default_text
from tests.support.running_gateway import running_server, wait_until

R = TypeVar("R", bound=Recorder)
READY_S: Final = 300.0
_QUEUE: Final = {"limit": 1000, "timeout_s": 900}
"""For all requests of a run at once."""


@contextlib.contextmanager
def relayed(relay: R) -> Iterator[tuple[R, str]]:
    """Run a relay in front of an engine; return it and its URL."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    with running_server(relay, sockets=[listener]):
        yield relay, f"http://127.0.0.1:{listener.getsockname()[1]}"


class Gateway:
    """A client of a gateway, and what it says of its workers."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=1800, limits=limits, trust_env=False)

    def workers(self) -> dict[str, Any]:
        return dict(self.client.get("/v1/status", headers=AS_ADMIN).json()["workers"])

    def seconds_until(self, condition: Callable[[dict[str, Any]], bool]) -> float:
        """Wait until a condition of the workers is true; return after how many seconds."""
        began_s = time.monotonic()
        wait_until(lambda: condition(self.workers()), within_s=READY_S)
        return time.monotonic() - began_s

    def wait_until_ready(self, *names: str) -> float:
        return self.seconds_until(
            lambda found: all(found.get(name, {}).get("state") == "ready" for name in names)
        )


def _settings(folder: Path, entries: Sequence[StaticWorker]) -> dict[str, str]:
    """Write the files of a gateway of these engines; return the settings that name them.

    The policy is the shipped one, with queues for all requests of a run at once.
    """
    document = yaml.safe_load(default_text())
    for pool in document["pools"].values():
        pool["queue"] = _QUEUE
    workers = []
    for one in entries:
        named = {"models": dict(one.names)} if one.names else {}
        workers.append({"id": one.id, "url": one.url, **named})
    files = {"CONFIG": {"workers": workers}, "POLICY": document}
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(json.dumps(content))  # JSON is YAML
    return {name: str(folder / f"{name}.yaml") for name in files}


@contextlib.asynccontextmanager
async def gateway_of(*entries: StaticWorker) -> AsyncIterator[Gateway]:
    """Run a gateway of these engines; the caller waits until they are ready."""
    port = fixed_port()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        part = gateway_part(Path(folder), port, **_settings(Path(folder), entries))
        gateway = Gateway(f"http://127.0.0.1:{port}")
        try:
            await part.start()
            await wait_until_up(port)
            with gateway.client:
                yield gateway
        finally:
            await part.stop()
