"""The service as a launchd agent, or as a daemon on a Mac where nobody logs in.

The tests use a scripted `launchctl`: this has not been tested on a Mac.
"""

from __future__ import annotations

import os
import plistlib
import pwd
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gateway.cli import CommandError
from gateway.cli.service.system import LONGEST_STOP_S, NAME, RESTART_DELAY_S, call, sudo_account

DAEMONS = Path("/Library/LaunchDaemons")
_POLL_S, _UNLOAD_S = 0.1, 10.0


class Launchd:
    """Keeps the service running on a Mac."""

    def __init__(self, *, system: bool) -> None:
        # A daemon is installed with sudo, and runs as the account that has used it.
        account = sudo_account()
        self._account = {"UserName": account} if system else {}
        self.home = Path(pwd.getpwnam(account).pw_dir) if account else Path.home()
        agent, daemon = self.home / f"Library/LaunchAgents/{NAME}.plist", DAEMONS / f"{NAME}.plist"
        self.definition, self._other = (daemon, agent) if system else (agent, daemon)
        self._domain = "system" if system else f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{NAME}"

    def install(self, command: Sequence[str], environment: Mapping[str, str], stop_s: int) -> str:
        """Start the service, in place of an older one; return a warning, or nothing."""
        if self._other.exists():
            raise CommandError(f"First uninstall the service of {self._other}.")
        definition = {
            "Label": NAME,
            "ProgramArguments": [*command],
            "EnvironmentVariables": {"HOME": str(self.home), **environment},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_DELAY_S,
            "ExitTimeOut": stop_s,
            "ProcessType": "Interactive",  # else macOS may slow the processor and the disk down
            **self._account,
        }
        self._unload()
        self.definition.parent.mkdir(parents=True, exist_ok=True)
        self.definition.write_bytes(plistlib.dumps(definition))
        self.definition.chmod(0o644)
        call("launchctl", "enable", self._target)
        call("launchctl", "bootstrap", self._domain, str(self.definition))
        return ""

    def state(self) -> tuple[int, str]:
        """Return its process (0: none), and its last exit code if launchd knows it."""
        printed = call("launchctl", "print", self._target, may_fail=True).stdout
        process = re.search(r"^\s*pid = (\d+)$", printed, re.MULTILINE)
        ended = re.search(r"^\s*last exit code = (\d+)", printed, re.MULTILINE)
        return int(process[1]) if process else 0, ended[1] if ended else ""

    def restart(self) -> None:
        """Start the service again, a running gateway in its process; load an unloaded one."""
        words = plistlib.loads(self.definition.read_bytes())["ProgramArguments"]
        if self.state()[0] and "worker" not in words:
            call("launchctl", "kill", "SIGUSR2", self._target)
            return
        self.stop()
        if call("launchctl", "kickstart", "-k", self._target, may_fail=True).returncode:
            call("launchctl", "bootstrap", self._domain, str(self.definition))

    def uninstall(self) -> None:
        """Unload the service and delete its property list."""
        self._unload()
        self.definition.unlink()

    def _unload(self) -> None:
        self.stop()
        call("launchctl", "bootout", self._target, may_fail=True)  # it may not be loaded
        printing = ("launchctl", "print", self._target)  # fails once launchd has forgotten it
        _wait(lambda: bool(call(*printing, may_fail=True).returncode), _UNLOAD_S)

    def stop(self) -> None:
        """End the service by SIGTERM: `kickstart -k` and `bootout` may not wait for requests."""
        if process := self.state()[0]:
            call("launchctl", "kill", "SIGTERM", self._target, may_fail=True)
            _wait(lambda: self.state()[0] != process, LONGEST_STOP_S)


def _wait(reached: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not reached() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
