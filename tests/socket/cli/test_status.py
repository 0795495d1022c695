"""`paceline status --watch` in a process of its own, on a terminal and with a pipe."""

import contextlib
import json
import os
import pty
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Self

import pytest
from pydantic import SecretStr

from gateway.cli import main
from tests.support.fault_proxy import running_proxy
from tests.support.http_server import Request, ServerConnection
from tests.support.paceline_forks import PIPES, PacelineFork
from tests.support.running_gateway import RunningGateway, make_settings, running_server, wait_until

ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
TIMEOUT_S = 60.0


class Watch:
    """A running `paceline status --watch` and its output."""

    def __init__(self, url: str, *arguments: str, terminal: bool) -> None:
        self._read_fd, write_fd = pty.openpty() if terminal else os.pipe()
        self.process = PacelineFork(
            ["status", "--watch", "0.1", "--url", url, *arguments],
            **{**PIPES, "stdout": write_fd},
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(write_fd)
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, *, since: int = 0) -> int:
        """Wait for a text; return the length of the output then."""
        wait_until(lambda: text in self.output[since:], within_s=TIMEOUT_S)
        return len(self.output)

    def end(self) -> tuple[int, str]:
        """Send SIGINT; return the exit code and the standard error."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return self.process.returncode, errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._read_fd)

    def _read(self) -> None:
        # A terminal raises OSError when its last writer closes it.
        with contextlib.suppress(OSError):
            while data := os.read(self._read_fd, 65536):
                self.output += data.decode(errors="replace")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_watch_prints_every_refresh_and_continues_after_an_outage_of_the_gateway(
    gateway_with_worker: RunningGateway, terminal: bool
) -> None:
    with (
        running_proxy(gateway_with_worker.url) as proxy,
        Watch(proxy.url, terminal=terminal) as watch,
    ):
        wait_until(lambda: watch.output.count("text-mtp") >= 3)
        proxy.refuse()
        watch.wait_for("no gateway answers")
        outage = watch.wait_for("The state at")
        proxy.listen()
        recovery = watch.wait_for("every 0.1 s", since=outage)
        wait_until(lambda: "no gateway answers" not in watch.output[recovery:][-400:])
        assert watch.end() == (0, "")
    assert (ENTER_SCREEN in watch.output, LEAVE_SCREEN in watch.output) == (terminal, terminal)
    assert ("\x1b" in watch.output) == terminal


def test_a_json_watch_prints_one_line_per_refresh(gateway_with_worker: RunningGateway) -> None:
    with Watch(gateway_with_worker.url, "--json", terminal=False) as watch:
        wait_until(lambda: watch.output.count("\n") >= 2)
        assert watch.end() == (0, "")
    states = [json.loads(line) for line in watch.output.splitlines()]
    assert all(state["gateway"]["ready"] for state in states)


def test_the_table_reports_a_degraded_store(private_redis, tmp_path, capsys) -> None:
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


def test_a_closed_pipe_ends_a_watch_without_an_error(gateway_with_worker: RunningGateway) -> None:
    arguments = ("status", "--json", "--watch", "0.1", "--url", gateway_with_worker.url)
    with PacelineFork(arguments, **PIPES, env=os.environ) as watch:
        assert watch.stdout is not None
        assert watch.stderr is not None
        assert watch.stdout.readline().startswith("{")
        watch.stdout.close()
        assert watch.stderr.read() == ""
        assert watch.wait(TIMEOUT_S) == 128 + signal.SIGPIPE


def test_c18_control_characters_of_a_worker_or_an_error_do_not_reach_the_terminal(
    gateway_with_worker: RunningGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    escape = "\x1b]0;owned\x07\x9b2J"
    state = gateway_with_worker.status()
    worker = state["workers"].pop("fake-a")
    lanes = {escape + name: lane for name, lane in worker["lanes"].items()}
    state["workers"][f"fake-a{escape}"] = {**worker, "model": f"demo{escape}", "lanes": lanes}
    state["policy"]["file_problem"] = state["store"]["problem"] = escape
    with serving_json(200, state) as url:
        for arguments in ([], ["--json"]):
            assert main(["status", "--url", url, *arguments]) == 0
            output = capsys.readouterr().out
            assert "demo" in output
            assert not {"\x1b", "\x07", "\x9b"} & {*output}
    with (
        serving_json(400, {"error": {"message": "no \x1b[2J"}}) as url,
        pytest.raises(SystemExit) as ended,
    ):
        main(["status", "--url", url])
    assert str(ended.value.code) == "paceline: the gateway refused: no \ufffd[2J"


@contextlib.contextmanager
def serving_json(status: int, value: object) -> Iterator[str]:
    """Serve one JSON value for every request."""

    async def respond(connection: ServerConnection, _request: Request) -> None:
        body = json.dumps(value).encode()
        await connection.send_head(status, (), length=len(body))
        await connection.send_body(body)

    listener = socket.create_server(("127.0.0.1", 0))
    with running_server(respond, sockets=[listener]):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
