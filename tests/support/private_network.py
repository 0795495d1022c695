"""A second machine for tests: a network namespace of Linux in which one process runs.

It needs root. The namespace has no name, so it ends with its process.
"""

from __future__ import annotations

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

_MACHINES: set[int] = set()
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
    """A machine with one process, and a cable to it.

    The addresses are those of this process only, so that tests run side by side; it may have two.
    """

    def __init__(self, pid: int) -> None:
        own = os.getpid()
        self._pid = pid
        self._number = next(number for number in range(2) if number not in _MACHINES)
        _MACHINES.add(self._number)
        self._cable = f"machine{self._number}{own}"
        self._network = f"10.{64 + 64 * self._number + own % 64}.{own // 64 % 256}"
        self.address = f"{self._network}.100"
        """That of the second machine."""

    def addresses_here(self, count: int) -> list[str]:
        """Return addresses of this machine that the other one reaches, nine at most."""
        return [f"{self._network}.{number}" for number in range(1, count + 1)]

    def plug_in(self) -> None:
        """Connect both machines, on which the process begins."""
        peer = ("peer", "name", "eth0", "netns", str(self._pid))
        _run("ip", "link", "add", self._cable, "type", "veth", *peer)
        for address in self.addresses_here(9):
            _run("ip", "addr", "add", f"{address}/24", "dev", self._cable)
        _run("ip", "link", "set", self._cable, "up")
        self._run_there("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self._run_there("ip", "link", "set", "eth0", "up")

    def unplug(self) -> None:
        """Remove the cable now: the system takes its time to do so after the process has ended."""
        subprocess.run(["ip", "link", "del", self._cable], capture_output=True, check=False)
        _MACHINES.discard(self._number)

    def used_bytes(self) -> int:
        """Return how much the files in /tmp of the second machine take."""
        disk = os.statvfs(f"/proc/{self._pid}/root/tmp")
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize

    def datagram_socket(self, address: tuple[str, int]) -> socket.socket:
        """Return a socket that is bound on the second machine and used by this process."""
        self._run_there("ip", "link", "set", "lo", "up")
        created: list[socket.socket] = []

        def bind() -> None:
            library = ctypes.CDLL(None, use_errno=True)
            with Path(f"/proc/{self._pid}/ns/net").open() as namespace:
                if library.setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "no access to the namespace")
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
    """Yield a machine on which a program begins when the cable is plugged in."""
    command = [*_ISOLATED, "sh", "-c", _START, "sh", str(program), *arguments]
    with subprocess.Popen(command, stdin=stdin) as process:
        try:
            own = Path("/proc/self/ns/net").readlink()
            wait_until(lambda: Path(f"/proc/{process.pid}/ns/net").readlink() != own)
            machine = SecondMachine(process.pid)
            try:
                yield machine
            finally:
                machine.unplug()
        finally:
            process.terminate()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
