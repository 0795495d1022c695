"""A worker that has paired with a gateway, served and joined as in production, without a model."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from pydantic import SecretStr

from paceline.certificates import Identity, identity_file
from paceline.http import paired_tls
from paceline.lifecycle import Shutdown
from paceline.pairing import Pairing
from tests.support.pairing import pair, show_code
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_engine import ScriptedEngine, make_worker, text_events
from workers.heartbeat import Membership, joined
from workers.identity import WorkerIdentity
from workers.server.server import serve


@dataclass
class PairedWorker:
    """What a test needs of a running one."""

    worker_id: str
    port: int
    file: Path
    """Of its identity."""
    pairing: Pairing

    @property
    def identity(self) -> Identity:
        return Identity.model_validate_json(self.file.read_bytes())

    def connect(self, identity: Identity | None, name: str = "") -> ssl.SSLSocket:
        """Connect to its port by TLS, with the certificate of an identity, and ask for its life.

        Raise an error of `ssl` if either side refuses the other; '' accepts any name.
        """
        context = paired_tls()
        context.check_hostname = bool(name)
        if identity is None:
            context.load_verify_locations(cadata=self.identity.authority)
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
def paired_worker(
    gateway: RunningGateway, folder: Path, name: str = "mini", *, with_key: bool = True
) -> Iterator[PairedWorker]:
    """Pair, and run a worker while the context lasts: without a key, as of an older version."""
    identity = Identity.new()
    key = identity.public_key if with_key else ""
    pairing = pair(gateway, show_code(gateway), name, public_key=key)
    file = identity_file(folder, gateway.url, name)
    if with_key:
        certified = identity.renewed(pairing.certificate, pairing.authority)
        file.write_text(certified.model_dump_json())
    with running(gateway, pairing, file) as worker:
        yield worker


@contextlib.contextmanager
def running(
    gateway: RunningGateway, pairing: Pairing, file: Path, port: int = 0
) -> Iterator[PairedWorker]:
    """Run a paired worker while the context lasts."""
    started: Future[tuple[asyncio.AbstractEventLoop, Shutdown]] = Future()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    port = listener.getsockname()[1]
    token = SecretStr(pairing.token)

    async def main() -> None:
        shutdown = Shutdown()
        made = make_worker(ScriptedEngine(text_events("one", " two")))
        worker = replace(made, worker_id=pairing.worker_id, url=f"http://127.0.0.1:{port}")
        identity = WorkerIdentity(file)
        membership = Membership(
            gateway_url=gateway.url,
            token=token,
            worker_id=worker.worker_id,
            report=worker.report,
            changed=worker.changed,
            identity=identity,
        )
        async with joined(membership):
            await serve(
                worker,
                listener,
                token=token,
                nodes_key=pairing.nodes_key,
                identity=identity,
                shutdown=shutdown,
                on_ready=lambda: started.set_result((asyncio.get_running_loop(), shutdown)),
            )

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    loop, shutdown = started.result(timeout=60)
    try:
        yield PairedWorker(pairing.worker_id, port, file, pairing)
    finally:
        loop.call_soon_threadsafe(shutdown.request)
        loop.call_soon_threadsafe(shutdown.request)
        thread.join(timeout=60)
        listener.close()
