"""`paceline status` as a user runs it, against a real gateway."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from pydantic import SecretStr

from gateway.cli import main
from tests.support.http_server import Request, ServerConnection
from tests.support.paceline_forks import PIPES, PacelineFork
from tests.support.running_gateway import RunningGateway, make_settings, running_server, wait_until
from tests.support.scripted_worker import Script


def test_the_table_reports_a_degraded_store(private_redis, tmp_path, capsys) -> None:
    settings = make_settings(tmp_path, redis_url=SecretStr(private_redis.url))
    with RunningGateway(settings) as gateway:
        assert main(["status", "--url", gateway.url]) == 1, "no worker"
        assert "is not sharing all state" not in capsys.readouterr().out
        private_redis.kill()
        wait_until(lambda: gateway.status()["store"]["state"] == "degraded")
        assert main(["status", "--url", gateway.url]) == 1
    assert "This gateway is not sharing all state with others: Redis cannot be reached." in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_column_vanishes_and_no_name_date_or_id_is_cut_in_two(
    gateway_with_worker, worker, capsys, monkeypatch, columns
) -> None:
    """Where a table has no room, the fields of a row follow its name, line by line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    gateway, url = gateway_with_worker, ("--url", gateway_with_worker.url)
    secret = gateway.create_key(name="Ann-of-the-laboratory", team="laboratory")["secret"]
    gateway.use_key(secret)
    monkeypatch.setenv("PACELINE_API_KEY", secret)
    worker.script = Script(status=500)
    failed = gateway.chat(temperature=0.5)
    shown = {}
    for command in (
        "status",
        "errors",
        "keys list",
        "keys usage",
        "engines list",
        "policy history",
    ):
        assert main([*command.split(), *url]) == 0
        shown[command] = printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= columns or columns == 200, printed
        assert main([*command.split(), *url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out), command
    zone, failure = f"{datetime.now(UTC).astimezone():%Z}", failed.headers["x-request-id"]
    for command, names in (
        ("status", ("fake-a ready", "text-mtp", "Waiting", "Per step", "temperature above 0 (1)")),
        (
            "errors",
            (failure, "Ann-of-the-laboratory", "worker_failed", zone),
        ),
        ("keys list", ("Ann-of-the-laboratory", "laboratory", "May use", "Limits")),
        ("keys usage", (f"{datetime.now(UTC):%Y-%m-%d}", "Ann-of-the-laboratory", "Estimated")),
        ("policy history", ("Version" if columns == 200 else "1\n", "When")),
    ):
        assert all(name in shown[command] for name in names), shown[command]
    assert "rerank" not in shown["status"], "the pool has no worker"


def test_a_closed_pipe_ends_a_command_without_an_error(gateway_with_worker) -> None:
    arguments = ("status", "--json", "--url", gateway_with_worker.url)
    with PacelineFork(arguments, **PIPES, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 128 + signal.SIGPIPE


def test_c18_control_characters_of_a_worker_or_an_error_do_not_reach_the_terminal(
    gateway_with_worker: RunningGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    escape = "\x1b]0;owned\x07\x9b2J"
    state = gateway_with_worker.status()
    worker = state["workers"].pop("fake-a")
    lanes = {escape + name: lane for name, lane in worker["lanes"].items()}
    state["workers"][f"fake-a{escape}"] = {
        **worker,
        "model": f"demo[b]:car:{escape}",
        "lanes": lanes,
    }
    state["policy"]["file_problem"] = state["store"]["problem"] = escape
    with serving_json(200, state) as url:
        for arguments in ([], ["--json"]):
            assert main(["status", "--url", url, *arguments]) == 0
            output = capsys.readouterr().out
            assert "demo[b]:car:" in output
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
