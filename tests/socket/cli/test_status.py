"""`paceline status --watch`, in a process of its own, on a terminal and into a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.cli import main
from tests.support.fault_proxy import FaultProxy, running_proxy
from tests.support.gateway_fixtures import KeepJoined
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import RunningGateway, make_settings, wait_until

ROOT = Path(__file__).parents[3]
ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"
PATIENCE_S = 60.0


class Watch:
    """A running `paceline status --watch` and all that it has written."""

    def __init__(self, url: str, *arguments: str, terminal: bool) -> None:
        self._read_fd, write_fd = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "status", "--watch", "0.1", "--url", url, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=write_fd,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(write_fd)
        self.written = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, *, since: int = 0) -> int:
        """Return how much was written when this text had come."""
        wait_until(lambda: text in self.written[since:], within_s=PATIENCE_S)
        return len(self.written)

    def end(self) -> tuple[int, str]:
        """Press Ctrl-C; return the exit code and what went to standard error."""
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return self.process.returncode, said.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._read_fd)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes any more
            while piece := os.read(self._read_fd, 65536):
                self.written += piece.decode(errors="replace")


@contextlib.contextmanager
def watching(url: str, *arguments: str, terminal: bool) -> Iterator[Watch]:
    watch = Watch(url, *arguments, terminal=terminal)
    try:
        yield watch
    finally:
        watch.close()


@pytest.fixture
def proxy(gateway_with_worker: RunningGateway) -> Iterator[FaultProxy]:
    """A way to the gateway that can be closed and opened."""
    with running_proxy(gateway_with_worker.url) as between:
        yield between


@pytest.mark.parametrize("terminal", [True, False])
def test_a_watch_outlives_a_gateway_that_goes_away_and_returns(
    proxy: FaultProxy, terminal: bool
) -> None:
    with watching(proxy.url, terminal=terminal) as watch:
        watch.wait_for("text-mtp")
        proxy.refuse()
        watch.wait_for("no gateway answers")
        gone = watch.wait_for("The state at")
        proxy.listen()
        back = watch.wait_for("every 0.1 s", since=gone)
        wait_until(lambda: "no gateway answers" not in watch.written[back:][-400:])
        code, said = watch.end()
    assert (code, said) == (0, "")
    assert (ENTERED in watch.written, LEFT in watch.written) == (terminal, terminal)
    assert ("\x1b" in watch.written) == terminal


def test_a_piped_watch_prints_again_and_again(gateway_with_worker: RunningGateway) -> None:
    with watching(gateway_with_worker.url, terminal=False) as watch:
        wait_until(lambda: watch.written.count("fake-a") >= 3, within_s=PATIENCE_S)
        assert watch.end() == (0, "")


def test_a_watch_as_json_prints_a_line_each_time(
    gateway: RunningGateway, keep_joined: KeepJoined
) -> None:
    keep_joined(gateway)
    with watching(gateway.url, "--json", terminal=False) as watch:
        wait_until(lambda: watch.written.count("\n") >= 2, within_s=PATIENCE_S)
        assert watch.end() == (0, "")
    states = [json.loads(told) for told in watch.written.splitlines()]
    assert all(state["gateway"]["ready"] for state in states)


def test_the_table_says_what_is_wrong_with_what_gateways_share(
    private_redis: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(tmp_path, redis_url=SecretStr(private_redis.url))
    with RunningGateway(settings) as gateway:
        assert main(["status", "--url", gateway.url]) == 1, "no worker"
        assert "does not share all state" not in capsys.readouterr().out
        private_redis.kill()
        wait_until(lambda: gateway.status()["store"]["state"] == "degraded")
        assert main(["status", "--url", gateway.url]) == 1
    assert "This gateway does not share all state with others: Redis cannot be reached." in (
        capsys.readouterr().out
    )


def test_a_reader_that_has_enough_ends_a_watch_without_a_word(
    gateway_with_worker: RunningGateway,
) -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gateway",
            "status",
            "--json",
            "--watch",
            "0.1",
            "--url",
            gateway_with_worker.url,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as watch:
        assert watch.stdout is not None
        assert watch.stderr is not None
        assert watch.stdout.readline().startswith(b"{")
        watch.stdout.close()
        assert watch.stderr.read() == b""
        assert watch.wait(PATIENCE_S) == 128 + signal.SIGPIPE
