"""`paceline service` with scripted commands of the system, and the process that it installs."""

import contextlib
import os
import plistlib
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.cli import main, upgrade
from gateway.cli.service import __main__ as running
from gateway.cli.service import launchd
from tests.support.paceline_process import process_environment
from tests.support.running_gateway import wait_until

LAUNCHCTL = """#!/bin/sh
cd "$HOME"
[ "$1" = print ] || echo "$*" >>calls
state() { printf '\\tstate = any\\n\\tpid = %s\\n\\tlast exit code = %s\\n' "$@"; }
[ ! -e leaving ] || [ "$1" = print ] || exit 5
case "$1" in
print) # what ends does so after it has been asked for once
    [ ! -e ending ] || { rm ending && state 4711 0 && exit; }
    [ ! -e leaving ] || { rm leaving && exit; }
    cat loaded 2>/dev/null || exit 113
    ;;
bootstrap) state 4711 '(never exited)' >loaded ;;
kill) [ "$2" = SIGUSR2 ] || { touch ending && state none 0 >loaded; } ;;
kickstart) [ ! -e ending ] && [ -e loaded ] && state 4712 0 >loaded ;;
bootout) [ ! -e ending ] && rm -f loaded && touch leaving ;;
esac
"""
SYSTEMCTL = """#!/bin/sh
cd "$HOME"
[ "$XDG_RUNTIME_DIR" ] || exit 1 # without it the real one does not know which bus
case "$*" in
*show-environment*) ;;
*show*) sed -n "s/^${4#--property=}=//p" shown && exit ;;
*) echo "${0##*/} $*" >>calls ;;
esac
case "$*" in
*"$REFUSED"*) echo "Failed to connect to bus: no medium" >&2 && exit 1 ;;
esac
"""
RESTART_AND_STOP = "reload-or-restart", "stop"
RUNNING = "MainPID=4711\nExecMainStatus=0\nExecMainExitTimestampMonotonic=0\n"
FAILED = "MainPID=0\nExecMainStatus=2\nExecMainExitTimestampMonotonic=123\n"


class Machine:
    """A machine of one system, whose commands note their arguments in a file."""

    def __init__(self, name: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        self.home = home
        self._capsys = capsys
        scripts = {"launchctl": LAUNCHCTL, "systemctl": SYSTEMCTL, "loginctl": SYSTEMCTL}
        (home / "bin").mkdir()
        for command, script in scripts.items():
            self.add(command, script)
        (home / "shown").write_text(RUNNING)
        (home / "here").mkdir()
        monkeypatch.chdir(home / "here")
        for variable in {*os.environ} - {*process_environment(home), "PACELINE_STATE_DIR"}:
            monkeypatch.delenv(variable)
        for variable in ("SUDO_USER", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "PACELINE_STATE_DIR"):
            monkeypatch.setenv(variable, "")  # it is put back, whatever a command sets
            monkeypatch.delenv(variable)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("REFUSED", "nothing")
        monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr("platform.system", lambda: name)
        monkeypatch.setattr(launchd, "DAEMONS", home / "daemons")
        monkeypatch.setattr(launchd, "_POLL_S", 0.001)

    def add(self, command: str, script: str) -> None:
        file = self.home / "bin" / command
        file.write_text(script)
        file.chmod(0o755)

    def run(self, *arguments: str) -> str:
        """Return what a command prints, or its error, with its exit code if that is not 0."""
        try:
            code: object = main(["service", *arguments])
        except SystemExit as end:
            code = end.code
        printed = self._capsys.readouterr()
        failed = f"{code}: " if code not in (0, 2) else ""
        return f"{failed}{printed.out}{printed.err}"

    def calls(self) -> list[str]:
        file = self.home / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    @property
    def plist(self) -> dict[str, object]:
        return plistlib.loads((self.home / "Library/LaunchAgents/paceline.plist").read_bytes())

    @property
    def unit(self) -> Path:
        return self.home / ".config/systemd/user/paceline.service"


@pytest.fixture
def mac(tmp_path, monkeypatch, capsys):
    return Machine("Darwin", tmp_path, monkeypatch, capsys)


@pytest.fixture
def linux(tmp_path, monkeypatch, capsys):
    return Machine("Linux", tmp_path, monkeypatch, capsys)


def test_launchd_gets_an_interactive_job_with_absolute_paths_that_outlives_a_failure(mac) -> None:
    settings = mac.home / "here/paceline.yaml"
    settings.write_text("lame_duck_s: 5\ndrain_timeout_s: 100.5\n")
    told = mac.run("install", "gateway")
    assert told == f"The service runs `paceline gateway` with the settings of {settings}.\n"
    command = [sys.executable, "-P", "-m", "gateway.cli.service", str(settings.parent)]
    assert mac.plist == {
        "Label": "paceline",
        "ProgramArguments": [*command, "gateway", "--config", str(settings)],
        "EnvironmentVariables": {"HOME": str(mac.home), "PATH": os.environ["PATH"]},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 136,  # above the drain
        "ProcessType": "Interactive",
    }
    domain = f"gui/{os.getuid()}"
    plist = mac.home / "Library/LaunchAgents/paceline.plist"
    loading = [f"enable {domain}/paceline", f"bootstrap {domain} {plist}"]
    assert mac.calls() == [f"bootout {domain}/paceline", *loading]
    assert mac.run("status").startswith("The service runs (process 4711).\n")
    assert mac.run("restart") == "The service restarts once its running requests have ended.\n"
    assert mac.calls() == [f"kill SIGUSR2 {domain}/paceline"]
    # Running requests end before launchd kills anything.
    ending = f"kill SIGTERM {domain}/paceline"
    assert mac.run("stop").startswith("The service has stopped;")
    assert mac.calls() == [ending]
    mac.run("restart")
    assert mac.calls()[-1] == f"kickstart -k {domain}/paceline"
    assert "runs (process 4712); its last exit code was 0.\n" in mac.run("status")
    mac.run("install", "worker")
    assert mac.calls() == [ending, f"bootout {domain}/paceline", *loading]
    mac.run("restart")
    assert mac.calls() == [ending, f"kickstart -k {domain}/paceline"], "a worker keeps no queue"
    mac.run("uninstall")
    assert mac.calls() == [ending, f"bootout {domain}/paceline"]
    assert not plist.exists()


def test_a_service_that_somebody_has_unloaded_is_loaded_by_a_restart(mac) -> None:
    mac.run("install", "gateway")
    (mac.home / "loaded").unlink()
    assert mac.run("status").startswith("1: The service does not run.\n")
    mac.run("restart")
    assert mac.run("status").startswith("The service runs (process 4711).\n")


def test_a_daemon_belongs_to_the_account_that_uses_sudo(mac, monkeypatch) -> None:
    refused = "paceline: This service can only be changed with sudo, from the account"
    assert refused in mac.run("install", "--system")
    monkeypatch.setenv("SUDO_USER", "team")
    monkeypatch.setattr("os.geteuid", lambda: 501)  # another account, by `sudo -u`
    assert refused in mac.run("install", "--system")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    account = SimpleNamespace(pw_dir=str(mac.home))
    monkeypatch.setattr("pwd.getpwnam", lambda name: {"team": account}[name])
    assert "only be changed without sudo" in mac.run("install")
    mac.run("install", "gateway", "--system")
    plist = mac.home / "daemons/paceline.plist"
    assert plistlib.loads(plist.read_bytes())["UserName"] == "team"
    assert mac.calls()[-1] == f"bootstrap system {plist}"
    monkeypatch.delenv("SUDO_USER")
    assert mac.run("status").startswith("The service runs")
    for command in ("stop", "restart", "uninstall"):
        assert refused in mac.run(command)
    assert f"First uninstall the service of {plist}." in mac.run("install", "gateway")
    assert (mac.calls(), plist.exists()) == ([], True)


def test_systemd_gets_a_unit_that_it_verifies_and_lets_it_linger(linux, monkeypatch) -> None:
    folder = linux.home / 'a "100%" $HOME folder\\'
    folder.mkdir()
    (folder / "mine.yaml").write_text("drain_timeout_s: .inf\n")
    monkeypatch.setenv("HF_HOME", "/models/100% of it")
    told = linux.run("install", "gateway", "--config", str(folder / "mine.yaml"))
    assert told.startswith("The service runs `paceline gateway`")
    user = "systemctl --user"
    started = [f"{user} daemon-reload", f"{user} enable paceline.service"]
    started += [f"{user} restart paceline.service", "loginctl enable-linger"]
    assert linux.calls() == started
    unit = linux.unit.read_text()
    assert "ExecReload=kill -USR2 $MAINPID\n" in unit
    keeping = ("StartLimitIntervalSec=0", "Restart=on-failure", "RestartSec=10", "KillMode=mixed")
    lines = {*unit.splitlines()}
    assert lines > {*keeping, "TimeoutStopSec=3600", "Type=exec", "WantedBy=default.target"}
    assert '"HF_HOME=/models/100%% of it"' in unit
    assert f'''"{linux.home}/a \\"100%%\\" $HOME folder\\\\/mine.yaml"''' in unit
    if verify := shutil.which("systemd-analyze"):
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(linux.home)}
        checked = subprocess.run(
            [verify, "verify", "--user", str(linux.unit)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (checked.returncode, checked.stderr) == (0, "")
    linux.run("restart")
    linux.run("stop")
    assert linux.calls() == [f"{user} {verb} paceline.service" for verb in RESTART_AND_STOP]
    assert linux.run("status").startswith("The service runs (process 4711).\n")
    (linux.home / "shown").write_text(FAILED)
    failed = linux.run("status")
    assert failed.startswith("1: The service does not run; its last exit code was 2.\n")
    linux.run("uninstall")
    ended = [f"{user} disable --now paceline.service", f"{user} daemon-reload"]
    assert (linux.calls(), linux.unit.exists()) == (ended, False)


def test_a_service_that_ends_at_logout_says_so(linux, monkeypatch) -> None:
    monkeypatch.setenv("REFUSED", "enable-linger")
    assert "It ends at logout unless an admin runs" in linux.run("install", "gateway")


def test_a_service_gets_its_settings_of_a_file_and_names_the_variables_that_it_misses(
    linux, monkeypatch
) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "pk-a-secret-of-this-shell")
    monkeypatch.setenv("PACELINE_PORT", "none")
    told = linux.run("install", "gateway")
    assert f"the settings of {linux.home}/.paceline/paceline.yaml.\n" in told
    assert (
        "It does not get PACELINE_API_KEY, PACELINE_PORT from this shell; set them in that file."
        in told
    )
    assert "secret" not in linux.unit.read_text()


PACELINE = """#!/bin/sh
echo "paceline $*" >>"$HOME/calls"
[ "$*" != "service status" ] || exit "$BROKEN"
"""


@pytest.fixture
def installed(linux, monkeypatch) -> Path:
    """Have Paceline installed by uv from the wheel of a folder; return that folder."""
    old, tool = linux.home / "old", linux.home / "tool"
    for folder in (old, tool, linux.home / "new"):
        folder.mkdir()
    for folder in ("old", "new"):
        script = f'echo "install from {folder} $*" >>"$HOME/calls"; exit "$REFUSED_BY_UV"\n'
        (linux.home / folder / "install.sh").write_text(script)
    receipt = f'[tool]\nrequirements = [{{ name = "paceline", path = "{old}/a.whl" }}]\n'
    (tool / "uv-receipt.toml").write_text(receipt)
    linux.add("paceline", PACELINE)
    monkeypatch.setattr("sys.prefix", str(tool))
    monkeypatch.setattr(upgrade, "clone", lambda: None)
    monkeypatch.setattr(upgrade, "WATCH_S", 0.01)
    monkeypatch.setattr(upgrade, "_POLL_S", 0.01)
    monkeypatch.setenv("REFUSED_BY_UV", "0")
    monkeypatch.setenv("BROKEN", "0")
    return old


RESTARTED = ["paceline service restart", "paceline service status"]
STOPPED = "systemctl --user stop paceline.service"


def test_an_upgrade_drains_replaces_restarts_and_names_the_way_back(
    linux, installed, capsys
) -> None:
    assert main(["upgrade"]) == 0
    assert linux.calls() == ["install from old ", "paceline --version"], "there is no service"
    linux.run("install", "gateway")
    linux.calls()
    assert main(["upgrade", str(linux.home / "new")]) == 0
    assert linux.calls() == [STOPPED, "install from new ", *RESTARTED, "paceline --version"]
    assert f"`sh {installed}/install.sh` restores it." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "calls"),
    [("BROKEN", [*RESTARTED, RESTARTED[0]]), ("REFUSED_BY_UV", RESTARTED[:1])],
)
def test_a_version_that_does_not_start_or_install_is_told_and_the_service_is_not_left_stopped(
    linux, installed, monkeypatch, broken, calls
) -> None:
    linux.run("install", "gateway")
    linux.calls()
    monkeypatch.setenv(broken, "1")
    with pytest.raises(SystemExit, match=f"has failed; `sh {installed}/install.sh` restores"):
        main(["upgrade"])
    assert linux.calls() == [STOPPED, "install from old ", *calls]


def test_an_installer_that_is_missing_leaves_no_stopped_service(
    linux, installed, monkeypatch
) -> None:
    linux.run("install", "gateway")
    linux.calls()
    monkeypatch.setattr("sys.prefix", str(linux.home / "Cellar/paceline/0.1.0"))
    with pytest.raises(SystemExit, match="has failed; installing"):
        main(["upgrade"])
    assert linux.calls() == [STOPPED, RESTARTED[0]]


def test_an_upgrade_names_what_it_needs(linux, installed, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="Name the folder of the other version"):
        main(["upgrade", "none"])
    (linux.home / "tool/uv-receipt.toml").unlink()
    with pytest.raises(SystemExit, match="as you have installed it"):
        main(["upgrade"])
    monkeypatch.setattr(upgrade, "clone", lambda: linux.home)
    with pytest.raises(SystemExit, match="This is a clone: run `git pull`"):
        main(["upgrade"])
    assert linux.calls() == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("install", "--config", "none.yaml"), "The settings file "),
        (("install", "gateway", "--config", "bad.yaml"), "'port' in the configuration file"),
        (("install", "engine"), "[COMMAND]: 'engine' is not one of 'up', 'gateway', 'worker'"),
        (("install", "gateway", "--config", "a\nb.yaml"), "cannot contain control characters"),
        (("install", "--system"), "--system is only for macOS"),
        (("status",), "No service is installed; `paceline service install` installs it."),
        (("logs",), "No service is installed"),
        (("logs", "--lines", "0"), "--lines: '0' is not a number above 0"),
        (("stop",), "No service is installed"),
        (("restart",), "No service is installed"),
        (("uninstall",), "No service is installed"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(linux, arguments, error) -> None:
    Path("bad.yaml").write_text("port: eighty\n")
    Path("a\nb.yaml").write_text("")
    assert error in linux.run(*arguments)
    assert (linux.calls(), linux.unit.exists()) == ([], False)


def test_errors_of_the_system_reach_the_terminal_in_one_line(linux, monkeypatch) -> None:
    linux.run("install", "gateway")
    monkeypatch.setenv("REFUSED", "restart")
    problem = (
        "`systemctl --user reload-or-restart paceline.service` failed: Failed to connect to bus"
    )
    assert problem in linux.run("restart")
    (linux.home / "bin/systemctl").unlink()
    monkeypatch.setenv("PATH", str(linux.home / "bin"))
    assert "The command `systemctl" in linux.run("restart")
    linux.unit.unlink()
    assert "The command `systemctl" in linux.run("install", "gateway")
    assert not linux.unit.exists()
    linux.add("systemctl", SYSTEMCTL)
    linux.unit.parent.rmdir()
    linux.unit.parent.write_text("")
    assert f"{linux.unit}: " in linux.run("install", "gateway")


def test_the_log_rotates_and_a_full_disk_ends_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(running, "LOG_BYTES", 100)
    monkeypatch.setattr("logging.raiseExceptions", True)
    file = tmp_path / "state/logs/service.log"
    with contextlib.closing(running.open_log(file)) as log:
        for number in range(100):
            running.write(log, f"line {number:02} %s of the service")
    names = ["service.log", *(f"service.log.{number}" for number in range(1, 5))]
    assert sorted(one.name for one in file.parent.iterdir()) == names
    assert file.read_text().splitlines()[-1] == "line 99 %s of the service"
    assert all(one.stat().st_size <= 100 for one in file.parent.iterdir())
    assert file.parent.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    running.write(running.open_log(tmp_path / "file/logs/service.log"), "which no disk holds")


def test_the_installed_service_logs_drains_and_passes_its_exit_code_on(linux) -> None:
    settings = Path("paceline.yaml").absolute()
    settings.write_text(f"port: 0\nlame_duck_s: 0\nstate_dir: {linux.home}/state\n")
    linux.run("install", "gateway")
    words = re.search(r"^ExecStart=:(.*)$", linux.unit.read_text(), re.MULTILINE)
    assert words is not None
    command = re.findall(r'"([^"]*)"', words[1])
    log = linux.home / ".paceline/logs/service.log"
    environment = {**process_environment(linux.home), "HOME": str(linux.home)}
    del environment["PACELINE_STATE_DIR"]
    with subprocess.Popen(command, env=environment, cwd="/") as service:
        try:
            wait_until(lambda: log.exists() and "Paceline listens on" in log.read_text())
            service.send_signal(signal.SIGUSR2)
            wait_until(lambda: log.read_text().count("Paceline listens on") == 2, within_s=240)
        finally:
            service.send_signal(signal.SIGTERM)
            assert service.wait(60) == 0, log.read_text()
    text = log.read_text()
    assert f"The service starts `paceline gateway --config {settings}` (process " in text
    assert "\nEnded.\n" in text
    assert text.endswith("The service ended with exit code 0.\n")
    settings.write_text("port: -1\n")
    assert subprocess.run(command, env=environment, cwd="/", check=False).returncode == 2
    last = subprocess.run(
        [sys.executable, "-m", "gateway", "service", "logs", "--lines", "2"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "'port' in the configuration file" in last.stdout
    assert last.stdout.endswith("The service ended with exit code 2.\n")
