"""A worker process without a model that joins a gateway at an address of another network."""

import asyncio
import socket
import sys

from pydantic import SecretStr

from paceline.lifecycle import Shutdown
from tests.support.scripted_engine import ScriptedEngine, make_worker
from workers.heartbeat import Membership, joined
from workers.server.server import serve


def main() -> None:
    """Serve on all addresses until the process is killed."""
    token, gateway_url, port = sys.argv[1:]
    listener = socket.socket()
    listener.bind(("0.0.0.0", int(port)))
    asyncio.run(serve_and_join(listener, SecretStr(token), gateway_url))


async def serve_and_join(listener: socket.socket, token: SecretStr, gateway_url: str) -> None:
    worker = make_worker(ScriptedEngine())
    membership = Membership(
        gateway_url=gateway_url,
        token=token,
        worker_id=worker.worker_id,
        report=worker.report,
        changed=worker.changed,
        port=listener.getsockname()[1],
    )
    async with joined(membership):
        await serve(worker, listener, token=token, shutdown=Shutdown(), on_ready=lambda: None)


if __name__ == "__main__":
    main()
