"""Two processes that train one model: each draws its own batches, and gradients are averaged.

MLX computes most of a training step on one core. The second core runs a second rank, connected by
the ring of `mx.distributed`. There are always two ranks, on any number of cores, since the number
of rows in a step determines the weights.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import mlx.core as mx

RANKS: Final = 2
_RANK: Final = "MLX_RANK"
_HOSTS: Final = "MLX_HOSTFILE"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


@contextmanager
def all_ranks() -> Iterator[Any]:
    """Start this command as the other ranks too, and yield their group.

    The other ranks end with this process. A process of another rank only joins the group.
    """
    if _RANK in os.environ:
        yield mx.distributed.init(strict=True, backend="ring")
        return
    with TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(RANKS)]))
        os.environ |= {_HOSTS: str(hosts), _RANK: "0"}
        others = [
            subprocess.Popen(  # noqa: S603  # the command that runs already
                [sys.executable, *sys.orig_argv[1:]], env=os.environ | {_RANK: str(rank)}
            )
            for rank in range(1, RANKS)
        ]
        try:
            yield mx.distributed.init(strict=True, backend="ring")
            for other in others:
                other.wait()
        finally:
            for other in others:
                other.kill()
