"""A worker process without a model that joins a gateway at an address of another network."""

from __future__ import annotations

import asyncio
import socket
import sys

from pydantic import SecretStr

from tests.support.scripted_engine import ScriptedEngine, make_worker
from workers.lifecycle import Shutdown
from workers.server.server import serve


def main() -> None:
    """Serve on all addresses until the process is killed."""
    token, gateway_url, port = sys.argv[1:]
    listener = socket.socket()
    listener.bind(("0.0.0.0", int(port)))
    asyncio.run(
        serve(
            make_worker(ScriptedEngine()),
            listener,
            token=SecretStr(token),
            gateway_url=gateway_url,
            follows_route=True,
            shutdown=Shutdown(),
            on_ready=lambda: None,
        )
    )


if __name__ == "__main__":
    main()
