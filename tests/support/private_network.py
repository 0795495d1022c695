"""A second machine for tests: a network namespace of Linux in which one process runs.

It needs root. This machine's end of the cable is in a namespace too, which only the thread of the
test and what it starts see: Chromium, in the test beside it, ends all its requests when an
interface comes or goes. The namespaces have no name, so each ends with its last process.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from tests.support.running_gateway import wait_until

_NEW_NETWORK = 0x4000_0000
"""`CLONE_NEWNET` of Linux."""
_NETWORK = Path("/proc/thread-self/ns/net")
_LIBRARY = ctypes.CDLL(None, use_errno=True)
_ISOLATED = ("unshare", "--net", "--mount")
# The process has its program, an empty /tmp of 64 MB, and starts when the cable is plugged in.
_START = """
set -e
mount -t tmpfs none /run
touch /run/program
mount --bind "$1" /run/program
mount -t tmpfs -o size=64m none /tmp
shift
until grep -q eth0: /proc/net/dev; do sleep 0.02; done
exec /run/program "$@"
"""


def require_namespaces() -> None:
    """Skip the test where this user may create no network namespace."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("network namespaces need root on Linux")
    installed = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    if not installed or subprocess.run([*_ISOLATED, "true"], check=False).returncode:
        pytest.skip("this system allows no network namespaces")


class SecondMachine:
    """A machine with one process, and a cable to it."""

    address = "10.9.0.100"

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def addresses_here(self, count: int) -> list[str]:
        """Return addresses of this machine that the other one reaches, nine at most."""
        return [f"10.9.0.{number}" for number in range(1, count + 1)]

    def plug_in(self) -> None:
        """Connect both machines, on which the process begins."""
        peer = ("peer", "name", "eth0", "netns", str(self._pid))
        _run("ip", "link", "add", "cable", "type", "veth", *peer)
        for address in self.addresses_here(9):
            _run("ip", "addr", "add", f"{address}/24", "dev", "cable")
        _run("ip", "link", "set", "cable", "up")
        self._run_there("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self._run_there("ip", "link", "set", "eth0", "up")

    def used_bytes(self) -> int:
        """Return how much the files in /tmp of the second machine take."""
        disk = os.statvfs(f"/proc/{self._pid}/root/tmp")
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize

    def datagram_socket(self, address: tuple[str, int]) -> socket.socket:
        """Return a socket that is bound on the second machine and used by this process."""
        self._run_there("ip", "link", "set", "lo", "up")
        created: list[socket.socket] = []

        def bind() -> None:
            with Path(f"/proc/{self._pid}/ns/net").open() as namespace:
                _enter(namespace)
            created.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            created[0].bind(address)

        thread = threading.Thread(target=bind)  # a thread has a namespace of its own, and keeps it
        thread.start()
        thread.join()
        return created[0]

    def _run_there(self, *command: str) -> None:
        _run("nsenter", f"--net=/proc/{self._pid}/ns/net", *command)


@contextlib.contextmanager
def second_machine(
    program: Path, arguments: Sequence[str], stdin: IO[str]
) -> Iterator[SecondMachine]:
    """Yield a machine on which a program begins when the cable is plugged in.

    Meanwhile the network of this thread, and of what it starts, is one of its own.
    """
    command = [*_ISOLATED, "sh", "-c", _START, "sh", str(program), *arguments]
    with private_network(), subprocess.Popen(command, stdin=stdin) as process:
        try:
            own = _NETWORK.readlink()
            wait_until(lambda: Path(f"/proc/{process.pid}/ns/net").readlink() != own)
            yield SecondMachine(process.pid)
        finally:
            process.terminate()


@contextlib.contextmanager
def private_network() -> Iterator[None]:
    with _NETWORK.open() as before:
        if _LIBRARY.unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "no namespace")
        try:
            _run("ip", "link", "set", "lo", "up")
            yield
        finally:
            _enter(before)


def _enter(namespace: IO[str]) -> None:
    """Give this thread another network."""
    if _LIBRARY.setns(namespace.fileno(), 0):
        raise OSError(ctypes.get_errno(), "no access to the namespace")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
