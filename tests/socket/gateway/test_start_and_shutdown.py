"""Starting and shutting down: settings, startup errors, draining and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from gateway.assembly import Gateway
from gateway.config.settings import Settings, load_settings
from gateway.config.startup_checks import StoredSecret, ensure_secrets, secret_file
from gateway.errors import StartupError
from gateway.server import Listening, serve
from gateway.storage import disk_thread
from tests.support.gateway_process import running_gateway_process
from tests.support.paceline_process import LISTENS, PacelineProcess, start_paceline
from tests.support.running_gateway import RunningGateway, chat_body, make_settings, wait_until
from tests.support.scripted_worker import DONE, ScriptedWorker
from workers.lifecycle import Shutdown


def test_f35_a_draining_gateway_finishes_streams_and_rejects_new_requests(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 3
    with gateway_with_worker.stream() as response:
        chunks = response.iter_raw()
        received = next(chunks)
        gateway_with_worker.request_shutdown()
        wait_until(
            lambda: httpx.get(f"{gateway_with_worker.url}/readyz", timeout=60).status_code == 503
        )
        rejected = httpx.post(f"{gateway_with_worker.url}/v1/chat/completions", json={}, timeout=60)
        assert rejected.json()["error"]["code"] == "shutting_down"
        worker.resume.set()
        received += b"".join(chunks)
    assert received.endswith(DONE)
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


def test_f36_a_second_shutdown_request_ends_streams_with_an_error_event(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 3
    with gateway_with_worker.stream() as response:
        chunks = response.iter_raw()
        received = next(chunks)
        gateway_with_worker.request_shutdown()
        gateway_with_worker.request_shutdown()
        received += b"".join(chunks)
    assert b'"code":"shutting_down"' in received
    assert b"[DONE]" not in received
    gateway_with_worker.wait_closed()


def test_f35_the_drain_timeout_ends_a_hanging_stream(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 3
    with RunningGateway(make_settings(tmp_path, drain_timeout_s=0.1)) as gateway:
        gateway.send_heartbeat(worker)
        with gateway.stream() as response:
            chunks = response.iter_raw()
            received = next(chunks)
            gateway.request_shutdown()
            received += b"".join(chunks)
        assert b'"code":"shutting_down"' in received
        gateway.wait_closed()


async def test_an_occupied_port_fails_the_start_with_one_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = make_settings(tmp_path).model_copy(update={"port": port})
        problem = f"Cannot listen on 127.0.0.1 port {port}: another program uses the port"
        with pytest.raises(StartupError, match=problem):
            await serve(settings, shutdown=Shutdown())


async def test_an_unknown_host_fails_the_start_and_names_the_flag(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, api_key=SecretStr("static-key-of-20-characters"))
    settings = settings.model_copy(update={"host": "nosuchhost.invalid"})
    with pytest.raises(StartupError, match=r"no host 'nosuchhost.invalid'; .* with --host"):
        await serve(settings, shutdown=Shutdown())


async def test_listening_beyond_loopback_requires_a_key(tmp_path: Path) -> None:
    settings = make_settings(tmp_path).model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(StartupError, match="Set PACELINE_API_KEY first"):
        await serve(settings, shutdown=Shutdown())


async def test_with_a_key_the_gateway_listens_beyond_loopback(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, api_key=SecretStr("k" * 20)).model_copy(
        update={"host": "0.0.0.0"}
    )
    shutdown = Shutdown()
    addresses: list[str] = []

    def started(listening: Listening) -> None:
        addresses.append(listening.url)
        shutdown.request()

    async with asyncio.timeout(30):
        await serve(settings, shutdown=shutdown, started=started)
    assert addresses[0].startswith("http://0.0.0.0:")


async def test_an_invalid_policy_fails_the_start_with_file_and_field(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "version: 1\nroutes: [{name: a, to: [nowhere]}]\npools: {vlm: {lanes: [vlm]}}"
    )
    settings = make_settings(tmp_path, policy=policy)
    with pytest.raises(StartupError, match=r"policy\.yaml .*line 2: routes\.a\.to\.#1: "):
        await serve(settings, shutdown=Shutdown())


def test_flags_override_environment_which_overrides_file_which_overrides_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paceline.yaml").write_text("host: 127.0.0.2\nport: 1\nidle_timeout_s: 5\n")
    monkeypatch.setenv("PACELINE_PORT", "2")
    monkeypatch.setenv("PACELINE_IDLE_TIMEOUT_S", "6")
    settings = load_settings(port=3, host=None)
    assert (settings.port, settings.idle_timeout_s, settings.host) == (3, 6, "127.0.0.2")
    assert settings.connect_timeout_s == Settings().connect_timeout_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "'prot' in the configuration file: unknown setting"),
        ("port: many", "'port' in the configuration file: "),
        ("- a", "is not a YAML mapping"),
        ("a: [", "is not a YAML mapping"),
        ("1: 2", "is not a YAML mapping"),
    ],
)
def test_an_invalid_settings_file_is_named_with_its_field(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    with pytest.raises(StartupError, match=message):
        load_settings(file)


def test_an_invalid_environment_variable_is_named_without_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_PORT", "a-secret-by-mistake")
    with pytest.raises(StartupError, match="PACELINE_PORT: ") as error:
        load_settings()
    assert "a-secret-by-mistake" not in str(error.value)


def test_a_missing_settings_file_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        load_settings(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("name", ["join_token", "admin_key"])
def test_a_stored_secret_survives_a_restart_and_is_readable_by_its_owner_only(
    tmp_path: Path, name: StoredSecret
) -> None:
    settings = Settings(state_dir=tmp_path / "state")
    first = ensure_secrets(settings)
    second = ensure_secrets(settings)
    secret: SecretStr = getattr(first, name)
    assert secret == getattr(second, name)
    assert len(secret.get_secret_value()) >= 32
    file = secret_file(settings, name)
    assert file.read_text() == secret.get_secret_value()
    assert file.stat().st_mode & 0o777 == 0o600
    files = {"join-token", ".join-token.lock", "admin-key", ".admin-key.lock"}
    assert {path.name for path in file.parent.iterdir()} == files
    assert secret.get_secret_value() not in repr(first)


def test_a_stored_secret_that_is_empty_or_unreadable_fails_the_start(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    file = secret_file(settings, "admin_key")
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


def test_f35_after_sigterm_readyz_returns_503_and_requests_succeed_during_lame_duck(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with running_gateway_process(tmp_path, worker, LAME_DUCK_S="600") as (gateway, client):
        assert ready(client)
        with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            chunks = response.iter_raw()
            received = next(chunks)
            gateway.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not ready(client))
            assert client.post("/v1/chat/completions", json=chat_body()).status_code == 200
            worker.resume.set()
            received += b"".join(chunks)
        assert received.endswith(DONE)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.wait_for_end() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_f36_a_second_signal_ends_the_gateway_at_once(
    tmp_path: Path, worker: ScriptedWorker, second: signal.Signals
) -> None:
    worker.script.hang_after = 2
    with running_gateway_process(tmp_path, worker, LAME_DUCK_S="600") as (gateway, client):
        with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            chunks = response.iter_raw()
            received = next(chunks)
            gateway.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not ready(client))
            gateway.process.send_signal(second)
            received += b"".join(chunks)
        assert b'"code":"shutting_down"' in received
        assert b"[DONE]" not in received
        assert gateway.wait_for_end() == 0


def test_f35_a_stream_beyond_the_drain_timeout_gets_an_error_event(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    bounds = {"LAME_DUCK_S": "0", "DRAIN_TIMEOUT_S": "0.2"}
    with running_gateway_process(tmp_path, worker, **bounds) as (gateway, client):
        with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            chunks = response.iter_raw()
            received = next(chunks)
            gateway.process.send_signal(signal.SIGTERM)
            received += b"".join(chunks)
        assert b'"code":"shutting_down"' in received
        assert gateway.wait_for_end() == 0


@pytest.mark.parametrize("terminal", [True, False], ids=["a terminal", "a pipe"])
def test_c3_the_gateway_prints_a_link_with_the_stored_key_on_a_terminal_only(
    tmp_path: Path, terminal: bool
) -> None:
    state = tmp_path / "state"
    with start_paceline(
        "gateway", "--port", "0", environment={}, folder=tmp_path, terminal=terminal
    ) as process:
        gateway = PacelineProcess(process)
        page = gateway.wait_for(r"^Admin page: (.*)$")[1]
        url = gateway.wait_for(LISTENS)[1]
    key = (state / "admin-key").read_text()
    if terminal:
        assert page == f"{url}/admin#admin-key={key}"
    else:
        assert page == f"{url}/admin (admin key: {state}/admin-key)"
        assert key not in "\n".join(gateway.lines)


def test_c3_a_given_admin_key_is_never_printed(tmp_path: Path) -> None:
    environment = {"PACELINE_ADMIN_KEY": "given-canary"}
    with start_paceline(
        "gateway", "--port", "0", environment=environment, folder=tmp_path, terminal=True
    ) as process:
        gateway = PacelineProcess(process)
        gateway.wait_for(LISTENS)
    assert any("/admin (admin key: PACELINE_ADMIN_KEY)" in line for line in gateway.lines)
    assert "given-canary" not in "\n".join(gateway.lines)
