"""Kept responses in memory: bounded, expiring, and of one owner each."""

from gateway.memory_budget import MemoryBudget
from gateway.state.expiring import OVERHEAD_BYTES, RECORD_LIMIT_BYTES, TTL_S, MemoryRecords
from tests.support.fake_clock import FakeClock


async def test_a_record_belongs_to_its_owner_and_expires_after_its_last_use() -> None:
    clock = FakeClock()
    records = MemoryRecords(clock, MemoryBudget())
    assert await records.put("ann", "a", b"1")
    assert await records.get("bob", ["a"]) == [None]
    assert not await records.delete("bob", "a")
    clock.now_s += TTL_S / 2
    assert await records.get("ann", ["a", "b"]) == [b"1", None]
    clock.now_s += TTL_S * 0.75
    assert await records.get("ann", ["a"]) == [b"1"]
    clock.now_s += TTL_S
    assert await records.get("ann", ["a"]) == [None]
    assert not await records.delete("ann", "a")


async def test_a_record_is_replaced_only_while_it_is_the_one_that_was_read() -> None:
    records = MemoryRecords(FakeClock(), MemoryBudget())
    assert not await records.put("ann", "a", b"2", replaces=b"1")
    assert await records.put("ann", "a", b"1")
    assert await records.put("ann", "a", b"2", replaces=b"1")
    assert not await records.put("ann", "a", b"3", replaces=b"1")
    assert await records.get("ann", ["a"]) == [b"2"]
    assert await records.delete("ann", "a")


async def test_the_owner_with_the_most_makes_room() -> None:
    records = MemoryRecords(FakeClock(), MemoryBudget(), limit_bytes=4 * OVERHEAD_BYTES)
    await records.put("ann", "a", b"1")
    for name in ("b", "c", "d"):
        await records.put("bob", name, b"1234")
    assert await records.get("ann", ["a"]) == [b"1"]
    assert await records.get("bob", ["b", "c", "d"]) == [None, b"1234", b"1234"]
    assert not await records.put("ann", "e", b"x" * 4 * OVERHEAD_BYTES)
    assert not await records.put("eve", "e", b"x" * 2 * OVERHEAD_BYTES), "eve would have the most"
    assert await records.get("eve", ["e"]) == [None]
    large = MemoryRecords(FakeClock(), MemoryBudget())
    assert not await large.put("ann", "e", b"x" * (RECORD_LIMIT_BYTES + 1))


async def test_c27_a_record_leaves_memory_at_its_time_though_its_owner_never_returns() -> None:
    clock = FakeClock()
    records = MemoryRecords(clock, MemoryBudget())
    await records.put("ann", "a", b"1")
    clock.now_s += TTL_S
    await records.drop_expired()
    assert not records._records
    assert not records._holds
