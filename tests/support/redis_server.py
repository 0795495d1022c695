"""A redis-server on a free port, which tests stop, freeze, fill and restart."""

import contextlib
import functools
import itertools
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

TEST_DEADLINE_S = 30.0
"""Of a call to Redis in a test that is not about deadlines: a busy machine keeps it."""
_PORTS = 200


class RedisServer:
    """A redis-server, or another program of its kind, without persistence.

    `config` are further lines of its configuration.
    """

    def __init__(
        self,
        folder: Path,
        config: str = "",
        program: str = "redis-server",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._program = program
        self._arguments = arguments
        self._environment = environment
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = Redis(port=self.port, decode_responses=True, socket_timeout=60)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start an empty server and wait until it replies; kill it if it never does."""
        program = shutil.which(self._program)
        assert program, "the tests need redis-server: scripts/setup dev installs it"
        file = self._folder / f"redis-{self.port}.conf"
        own = f'port {self.port}\nbind 127.0.0.1\nsave ""\nappendonly no\n'
        file.write_text(own + self._config)
        self._process = subprocess.Popen(
            [program, file, *self._arguments],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            self._wait_for_reply()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the server; all its data is lost."""
        self.client.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def _wait_for_reply(self) -> None:
        until_s = time.monotonic() + 30
        while True:
            try:
                self.client.ping()
                return
            except RedisError:
                assert time.monotonic() < until_s, "redis-server does not start"
                time.sleep(0.02)

    def freeze(self) -> None:
        """Stop the process: connections stay open without replies."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def configure(self, name: str, value: str) -> None:
        self.client.config_set(name, value)


def free_port() -> int:
    """Return a port that no other test gets, also while the server is down.

    It is below the ephemeral range, from which connections take theirs.
    """
    _, ports = _own_ports()
    while True:
        port = next(ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@functools.cache
def _own_ports() -> tuple[socket.socket, Iterator[int]]:
    """Return ports of this process alone, which holds the first of them."""
    for first in range(20_000, 32_000, _PORTS):
        with contextlib.suppress(OSError):
            held = socket.create_server(("127.0.0.1", first))
            return held, itertools.cycle(range(first + 1, first + _PORTS))
    raise AssertionError("other tests hold all ports")
