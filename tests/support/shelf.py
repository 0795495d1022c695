"""A shelf of Macs: namespaces of Linux with a name, an address, processes and a home each.

They need root, and are on the network of this thread (`private_network`). A Mac, with all of its
processes, ends with this process, however that ends.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.paceline_process import PacelineProcess
from tests.support.running_gateway import wait_until
from tests.support.wheel import bare_environment

_BRIDGE = "shelf"
_ISOLATED = "unshare --net --uts --pid --mount-proc --fork --kill-child cat".split()
# Sets the clock of a process, and not its timers, a day ahead while a file exists.
_CLOCK = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && id == CLOCK_REALTIME && !access(AHEAD, F_OK)) now->tv_sec += 86400;
    return failed;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


class Mac:
    """A machine on the shelf."""

    def __init__(self, name: str, number: int, home: Path, pid: int) -> None:
        self.name = name
        self.home = home
        self._pid = pid
        self._link = f"mac{number}"
        self._ahead = home / "ahead"
        self._programs: list[PacelineProcess] = []
        clock = home / "clock.so"
        self._environment = {
            **bare_environment(),
            "HOME": str(home),
            "LD_PRELOAD": str(clock),
            "PYTHONUNBUFFERED": "1",
        }
        library = ("-shared", "-fPIC", f'-DAHEAD="{self._ahead}"', "-x", "c", "-")
        subprocess.run(["cc", "-o", clock, *library], input=_CLOCK, text=True, check=True)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "eth0", "netns", str(pid))
        _run("ip", "link", "set", self._link, "master", _BRIDGE, "up")
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "link", "set", "eth0", "up")
        self.move(number)

    def run(self, *command: str | Path) -> str:
        """Run a command to its end in the home; return its output."""
        return subprocess.run(
            self._within(*command),
            cwd=self.home,
            env=self._environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def start(self, *command: str | Path, stdin: str = "", **variables: str) -> PacelineProcess:
        """Start the program of this Mac in the home."""
        process = subprocess.Popen(
            self._within(*command),
            cwd=self.home,
            env=self._environment | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        self._programs.append(PacelineProcess(process))
        return self._programs[-1]

    def stop(self) -> None:
        """Let the program end, as a service does."""
        self.signal(signal.SIGTERM)
        assert self._programs[-1].wait_for_end() == 0

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        os.kill(_child(self._programs[-1].process.pid), number)

    def sleep(self) -> None:
        """Stop all processes, and cut the link."""
        self.run("sh", "-c", "kill -s STOP -- -1")
        _run("ip", "link", "set", self._link, "down")

    def wake(self) -> None:
        """Continue, with the clock a day ahead."""
        self._ahead.touch()
        _run("ip", "link", "set", self._link, "up")
        self._continue()

    def move(self, number: int) -> None:
        """Get another address."""
        self.run("ip", "addr", "flush", "dev", "eth0")
        self.run("ip", "addr", "add", f"10.9.0.{number}/24", "dev", "eth0")

    def switch_off(self) -> None:
        """End all processes at once, also if they sleep."""
        self._continue()
        os.kill(self._pid, signal.SIGKILL)
        for program in self._programs:
            program.wait_for_end()
            assert program.process.stdout is not None
            program.process.stdout.close()

    def _continue(self) -> None:
        # `nsenter` stops with its child, and lets it continue when it continues itself.
        for program in self._programs:
            program.process.send_signal(signal.SIGCONT)

    def _within(self, *command: str | Path) -> list[str]:
        target = ("nsenter", "--target", str(self._pid), "--net", "--uts", "--pid", "--mount")
        return [*target, *map(str, command)]


@contextlib.contextmanager
def shelf(names: tuple[str, ...], folder: Path) -> Iterator[list[Mac]]:
    """Yield Macs at 10.9.0.1 and the next addresses."""
    _run("ip", "link", "add", _BRIDGE, "type", "bridge", "mcast_snooping", "0")
    _run("ip", "addr", "add", "10.9.0.254/24", "dev", _BRIDGE)
    _run("ip", "link", "set", _BRIDGE, "up")
    with contextlib.ExitStack() as stack:
        macs = []
        for number, name in enumerate(names, 1):
            home = folder / name
            home.mkdir()
            holder = stack.enter_context(_holder())
            stack.callback(holder.kill)
            first = _child(holder.pid)
            wait_until(lambda first=first: _name(first) == "cat")  # type: ignore[misc]
            macs.append(Mac(name, number, home, first))
            stack.callback(macs[-1].switch_off)
        yield macs


def _holder() -> subprocess.Popen[bytes]:
    return subprocess.Popen(_ISOLATED, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: bool(children.read_text()))
    return int(children.read_text())


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
