"""`paceline` processes that are forks of one process, which has imported the gateway already.

A new interpreter imports it for a second of CPU time. Tests of what a command imports start one.
"""

import atexit
import ctypes
import functools
import importlib
import json
import os
import pkgutil
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PIPES: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
_MAX_REQUEST = 2**20
_REPORT = 12


class PacelineFork(subprocess.Popen[str]):
    """`paceline ARGUMENTS` as a process; it is used as one of `subprocess`.

    `-c PROGRAM ARGUMENTS` runs a program instead. `imported` names the module whose imports it
    finds done; `gateway` stands for all of its modules.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path = ROOT,
        imported: str = "gateway",
        **streams: Any,
    ) -> None:
        self._imported = imported
        super().__init__([*arguments], env=env, cwd=cwd, text=True, **streams)

    def _execute_child(self, args: list[str], *options: Any) -> None:
        """Fork instead. The signature is that of `subprocess` from Python 3.11 on."""
        cwd, env, pipes = options[4], options[5], options[9:15]
        streams = [
            number if fd == -1 else fd for number, fd in enumerate(pipes[i] for i in (0, 3, 5))
        ]
        self._report, report = socket.socketpair()
        request = {
            "arguments": args,
            "environment": dict(env),
            "folder": str(cwd),
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "network": f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net",
        }
        message = json.dumps(request).encode() + b"\n"
        control = _control(self._imported)
        with report:
            sent = socket.send_fds(control, [message], [*streams, report.fileno()])
            control.sendall(message[sent:])
        self.pid = self._read_report()
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]  # private

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        return self._exit_code(0)

    def _wait(self, timeout: float | None) -> int | None:
        if self._exit_code(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _exit_code(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout)[0]:
            self.returncode = self._read_report()
            self._report.close()
        return self.returncode

    def _read_report(self) -> int:
        return int(self._report.recv(_REPORT, socket.MSG_WAITALL))


@functools.cache
def _control(imported: str) -> socket.socket:
    """Start a process that forks; return the socket by which it is asked to."""
    control, theirs = socket.socketpair()
    number = theirs.fileno()
    command = [sys.executable, "-m", "tests.support.paceline_forks", str(number), imported]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[number], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        control.close()
        process.wait()

    atexit.register(end)
    return control


def _serve(control: socket.socket) -> None:
    """Fork for each request, until the other end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    keepers: list[int] = []
    while True:
        message, descriptors, *_ = socket.recv_fds(control, _MAX_REQUEST, 4)
        while message and not message.endswith(b"\n"):
            message += control.recv(_MAX_REQUEST)
        if not message:
            break
        keepers = [keeper for keeper in keepers if not os.waitpid(keeper, os.WNOHANG)[0]]
        if (keeper := os.fork()) == 0:
            _fork_and_report(json.loads(message), descriptors[:3], descriptors[3])
            return
        keepers.append(keeper)
        for descriptor in descriptors:
            os.close(descriptor)
    for keeper in keepers:
        os.waitpid(keeper, os.WNOHANG)


def _fork_and_report(request: dict[str, Any], streams: list[int], report: int) -> None:
    """Fork the command; send its id and, once it has ended, its exit code."""
    child = os.fork()
    if child == 0:
        _run(request, streams)
        return
    os.write(report, b"%*d" % (_REPORT, child))
    os.closerange(0, report)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(report, b"%*d" % (_REPORT, exit_code))
    os._exit(0)


def _run(request: dict[str, Any], streams: list[int]) -> None:
    """Be the command, as in an interpreter of its own."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, 64)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    _enter(Path(request["network"]))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.argv[1:] = request["arguments"]
    if sys.argv[1:2] == ["-c"]:
        program = sys.argv[2]
        del sys.argv[1:3]
        exec(program, {"__name__": "__main__"})
        return
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)


def _enter(network: Path) -> None:
    """Use the network of the thread that asks, which a test may have replaced on Linux."""
    if network.exists() and network.readlink() != Path("/proc/self/ns/net").readlink():
        with network.open() as namespace:
            ctypes.CDLL(None).setns(namespace.fileno(), 0)


def _import_all(package: ModuleType) -> None:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


if __name__ == "__main__":
    imported = importlib.import_module(sys.argv[2])
    if imported.__name__ == "gateway":
        _import_all(imported)
    _serve(socket.socket(fileno=int(sys.argv[1])))
