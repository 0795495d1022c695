"""A worker that has paired with a gateway, served and joined as in production, without a model."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.certificates import Identity
from paceline.http import paired_tls
from tests.support.pairing import Paired, paired
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_engine import ScriptedEngine, text_events
from tests.support.served_engine import served


@dataclass
class PairedWorker:
    """A running one, and the connections of whoever calls its port."""

    port: int
    paired: Paired

    def connect(self, identity: Identity | None, name: str = "") -> ssl.SSLSocket:
        """Connect with the certificate of an identity; raise an error of `ssl` if either refuses.

        '' accepts any name in the certificate of the worker.
        """
        context = paired_tls()
        context.check_hostname = bool(name)
        if identity is None:
            context.load_verify_locations(cadata=self.paired.identity.authority)
        else:
            identity.load(context)
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        return context.wrap_socket(raw, server_hostname=name or "any")

    def asked(self, identity: Identity | None, name: str = "") -> bytes:
        """Return the first bytes of an answer; none if the port closes the connection."""
        with self.connect(identity, name) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            return connection.recv(15)


@contextlib.contextmanager
def running(gateway: RunningGateway, pairing: Paired) -> Iterator[PairedWorker]:
    """Run a paired worker while the context lasts."""
    engine: Any = ScriptedEngine(text_events("one", " two"))
    name = pairing.pairing.worker_id
    with served(engine, name, join=gateway.url, paired=pairing) as worker:
        yield PairedWorker(int(worker.url.rpartition(":")[2]), pairing)


@contextlib.contextmanager
def paired_worker(
    gateway: RunningGateway, folder: Path, name: str = "mini", *, with_key: bool = True
) -> Iterator[PairedWorker]:
    """Pair, and run a worker while the context lasts: without a key, as of an older version."""
    with running(gateway, paired(gateway, folder, name, with_key=with_key)) as worker:
        yield worker
