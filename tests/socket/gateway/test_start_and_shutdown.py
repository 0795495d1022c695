"""Starting and shutting down: settings, startup errors, draining and signals."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from gateway import server
from gateway.assembly import Gateway
from gateway.config.settings import Settings
from gateway.config.startup_checks import StoredSecret, ensure_secrets, secret_file
from gateway.errors import StartupError
from gateway.server import Listening, serve
from gateway.state import disk_thread
from paceline.lifecycle import Shutdown
from tests.support.gateway_fixtures import MakeGateway
from tests.support.gateway_process import running_gateway_process
from tests.support.paceline_process import LISTENS, PacelineProcess, start_paceline
from tests.support.running_gateway import (
    RunningGateway,
    begun,
    chat_body,
    make_settings,
    wait_until,
)
from tests.support.scripted_worker import DONE, ScriptedWorker


def test_f35_a_draining_gateway_finishes_streams_and_rejects_new_requests(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    url = gateway_with_worker.url
    worker.script.hang_after = 3
    with begun(gateway_with_worker.stream()) as read:
        gateway_with_worker.request_shutdown()
        wait_until(lambda: httpx.get(f"{url}/readyz", timeout=60).status_code == 503)
        rejected = httpx.post(f"{url}/v1/chat/completions", json={}, timeout=60)
        assert rejected.json()["error"]["code"] == "shutting_down"
        worker.resume.set()
        assert read().endswith(DONE)
    gateway_with_worker.wait_closed()


async def test_l7_a_gateway_starts_once_the_disk_with_its_records_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(make_settings(tmp_path), None)
    records, hanging = tmp_path / "state.json", tmp_path / "hanging"
    os.mkfifo(records)  # to open it waits for a writer
    monkeypatch.setattr(disk_thread, "TIMEOUT_S", 0.01)
    opening = asyncio.create_task(gateway.open())
    done, _ = await asyncio.wait((opening,), timeout=0.2)
    assert not done, "a call that takes too long does not end the start"
    records.rename(hanging)
    monkeypatch.undo()
    records.write_text('{"usage": {}}')
    hanging.write_text("")
    await opening


def test_f35_the_drain_timeout_ends_a_hanging_stream_with_an_error_event(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 3
    gateway = make_gateway(worker, drain_timeout_s=0.1)
    with begun(gateway.stream()) as read:
        gateway.request_shutdown()
        assert b'"code":"shutting_down"' in read()
    gateway.wait_closed()


async def test_an_unknown_host_fails_the_start_and_names_the_flag(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, api_key=SecretStr("static-key-of-20-characters"))
    for host in ("nosuchhost.invalid", "*"):
        unknown = settings.model_copy(update={"host": host})
        with pytest.raises(StartupError, match=r"machine has no (host|address) .* with --host"):
            await serve(unknown, shutdown=Shutdown())


async def listening(settings: Settings) -> Listening:
    """Return what a gateway tells once it listens; it shuts down at once."""
    shutdown = Shutdown()
    told: list[Listening] = []

    def started(one: Listening) -> None:
        told.append(one)
        shutdown.request()

    await serve(settings, shutdown=shutdown, started=started)
    return told[0]


def test_the_host_of_all_addresses_of_ipv6_serves_ipv4_too(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, host="::", api_key=SecretStr("a-key-of-20-characters"))
    with RunningGateway(settings) as gateway:
        port = httpx.URL(gateway.url).port
        for address in ("127.0.0.1", "[::1]"):
            assert httpx.get(f"http://{address}:{port}/livez", timeout=60).status_code == 200


async def test_listening_beyond_loopback_requires_a_given_or_a_stored_key(tmp_path: Path) -> None:
    beyond = make_settings(tmp_path).model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(StartupError, match="Set PACELINE_API_KEY first"):
        await serve(beyond, shutdown=Shutdown())
    assert not (await listening(make_settings(tmp_path))).keyed
    given = await listening(beyond.model_copy(update={"api_key": SecretStr("k" * 20)}))
    with RunningGateway(make_settings(tmp_path)) as gateway:
        await asyncio.to_thread(gateway.create_key)
    for told in (given, await listening(beyond)):
        assert told.keyed
        assert told.url.startswith("http://0.0.0.0:")


def test_a_stored_secret_survives_a_restart_is_private_and_fails_a_start_if_it_is_damaged(
    tmp_path: Path,
) -> None:
    settings = Settings(state_dir=tmp_path / "state")
    first, second = ensure_secrets(settings), ensure_secrets(settings)
    names: tuple[StoredSecret, ...] = ("join_token", "admin_key")
    for name in names:
        secret: SecretStr = getattr(first, name)
        assert secret == getattr(second, name)
        assert len(secret.get_secret_value()) >= 32
        file = secret_file(settings, name)
        assert file.read_text() == secret.get_secret_value()
        assert file.stat().st_mode & 0o777 == 0o600
        assert secret.get_secret_value() not in repr(first)
    files = {"join-token", ".join-token.lock", "admin-key", ".admin-key.lock"}
    assert {path.name for path in file.parent.iterdir()} == files
    file.write_text("\n")
    with pytest.raises(StartupError, match=r"The admin key in \S+ is empty\."):
        ensure_secrets(settings)
    file.unlink()
    file.mkdir()
    with pytest.raises(StartupError, match=r"The admin key in .* Set PACELINE_ADMIN_KEY or"):
        ensure_secrets(settings)


async def test_c3_gateways_that_share_a_redis_need_a_common_admin_key(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, redis_url=SecretStr("redis://127.0.0.1:1"), admin_key=None)
    with pytest.raises(StartupError, match="set PACELINE_ADMIN_KEY to the same secret"):
        await serve(settings, shutdown=Shutdown())


def ready(client: httpx.Client) -> bool:
    return client.get("/readyz").status_code == 200


def begun_chat(client: httpx.Client) -> AbstractContextManager[Callable[[], bytes]]:
    return begun(client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)))


def test_f35_after_sigterm_readyz_returns_503_and_requests_succeed_during_lame_duck(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with running_gateway_process(tmp_path, worker, LAME_DUCK_S="600") as (gateway, client):
        assert ready(client)
        with begun_chat(client) as read:
            gateway.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not ready(client))
            assert client.post("/v1/chat/completions", json=chat_body()).status_code == 200
            worker.resume.set()
            assert read().endswith(DONE)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.wait_for_end() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_f36_a_second_signal_ends_the_gateway_at_once(tmp_path, worker, second) -> None:
    worker.script.hang_after = 2
    with running_gateway_process(tmp_path, worker, LAME_DUCK_S="600") as (gateway, client):
        with begun_chat(client) as read:
            gateway.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not ready(client))
            gateway.process.send_signal(second)
            received = read()
        assert b'"code":"shutting_down"' in received
        assert DONE not in received
        assert gateway.wait_for_end() == 0


@pytest.mark.parametrize(
    ("terminal", "given"),
    [(True, ""), (False, ""), (True, "given-canary")],
    ids=["a terminal", "a pipe", "a given key"],
)
def test_c3_the_gateway_prints_a_link_with_the_stored_key_on_a_terminal_only(
    tmp_path: Path, terminal: bool, given: str
) -> None:
    environment = {"PACELINE_ADMIN_KEY": given} if given else {}
    arguments = ("gateway", "--port", "0")
    with start_paceline(
        *arguments, environment=environment, folder=tmp_path, terminal=terminal
    ) as process:
        gateway = PacelineProcess(process)
        page = gateway.wait_for(r"^Admin page: (.*)$")[1]
        url = gateway.wait_for(LISTENS)[1]
    file = tmp_path / "state" / "admin-key"
    if given or not terminal:
        source = "PACELINE_ADMIN_KEY" if given else str(file)
        assert page == f"{url}/admin (admin key: {source})"
        assert (given or file.read_text()) not in "\n".join(gateway.lines)
    else:
        assert page == f"{url}/admin#admin-key={file.read_text()}"


def test_a_restart_keeps_its_listener_unless_the_settings_have_another_address(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = listener.getsockname()[1]
        for process, host, port, kept in (
            (os.getpid(), "127.0.0.1", own, True),
            (os.getpid(), "localhost", 0, True),
            (os.getpid(), "127.0.0.1", own - 1, False),
            (os.getpid(), "0.0.0.0", own, False),
            (1, "127.0.0.1", own, False),
        ):
            descriptor = os.dup(listener.fileno())
            monkeypatch.setenv(server._INHERITED, f"{process} {descriptor}")
            inherited = server._inherited(host, port)
            assert (inherited is not None) == kept
            assert server._INHERITED not in os.environ
            if inherited is not None:
                inherited.close()
            elif process == 1:
                os.close(descriptor)
