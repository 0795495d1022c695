"""A gateway of engines, and relays in front of them."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import yaml

from bench.engines.recorder import Recorder
from gateway.config.static_workers import StaticWorker
from policies.document import default_text
from tests.support.running_gateway import RunningGateway, make_settings, running_server, wait_until

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


def patient_policy() -> str:
    """Return the shipped policy with queues for all requests of a run at once."""
    document = yaml.safe_load(default_text())
    for pool in document["pools"].values():
        pool["queue"] = _QUEUE
    return yaml.safe_dump(document)


@contextlib.contextmanager
def gateway_of(*entries: StaticWorker, **settings: Any) -> Iterator[RunningGateway]:
    """Run a gateway whose workers are these engines, once all of them are ready."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(patient_policy())
        made = make_settings(Path(folder), workers=entries, policy=policy, **settings)
        with RunningGateway(made) as gateway:
            gateway.client.timeout = httpx.Timeout(600)

            def ready() -> bool:
                found = gateway.status()["workers"]
                return len(found) == len(entries) and all(
                    one["state"] == "ready" for one in found.values()
                )

            wait_until(ready, within_s=READY_S)
            yield gateway
