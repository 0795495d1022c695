"""The service as a unit of systemd that belongs to one account."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.cli.service.system import NAME, RESTART_DELAY_S, call

# The colon before the command line keeps `$` as it is.
_DEFINITION = """\
[Unit]
Description=Paceline
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart=:{}
{}Environment={}
Restart=on-failure
RestartSec={}
TimeoutStopSec={}
KillMode=mixed

[Install]
WantedBy=default.target
"""
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "%": "%%"})
_UNIT = f"{NAME}.service"


class Systemd:
    """Keeps the service running on Linux, also while nobody is logged in."""

    def __init__(self) -> None:
        self.home = Path.home()
        config = os.environ.get("XDG_CONFIG_HOME") or self.home / ".config"
        self.definition = Path(config) / "systemd/user" / _UNIT

    def install(self, command: Sequence[str], environment: Mapping[str, str], stop_s: int) -> str:
        """Start the service, in place of an older one; return a warning, or nothing."""
        variables = (f"{name}={value}" for name, value in environment.items())
        reload = "" if "worker" in command else "ExecReload=kill -USR2 $MAINPID\n"
        definition = _DEFINITION.format(
            _quoted(*command), reload, _quoted(*variables), RESTART_DELAY_S, stop_s
        )
        _systemctl("show-environment")  # fails, before anything is written, without systemd
        self.definition.parent.mkdir(parents=True, exist_ok=True)
        self.definition.write_text(definition)
        _systemctl("daemon-reload")
        _systemctl("enable", _UNIT)
        _systemctl("restart", _UNIT)
        lingers = not call("loginctl", "enable-linger", may_fail=True).returncode
        return "" if lingers else "It ends at logout unless an admin runs `loginctl enable-linger`."

    def state(self) -> tuple[int, str]:
        """Return its process (0: none), and its last exit code if it has ended before."""
        names = ("MainPID", "ExecMainStatus", "ExecMainExitTimestampMonotonic")
        process, code, ended_us = (
            _systemctl("show", _UNIT, f"--property={name}", "--value").strip() for name in names
        )
        return int(process or 0), "" if ended_us in ("", "0") else code

    def stop(self) -> None:
        """Stop the unit."""
        _systemctl("stop", _UNIT)

    def restart(self) -> None:
        """Restart the unit; a gateway that runs begins again in its process."""
        _systemctl("reload-or-restart", _UNIT)

    def uninstall(self) -> None:
        """Stop the unit and delete it."""
        _systemctl("disable", "--now", _UNIT)
        self.definition.unlink()
        _systemctl("daemon-reload")


def _systemctl(*arguments: str) -> str:
    os.environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")  # `su` does not set it
    return call("systemctl", "--user", *arguments).stdout


def _quoted(*words: str) -> str:
    return " ".join(f'"{word.translate(_ESCAPES)}"' for word in words)
