"""Readings of the memory, the rule on them, and the words of failed allocations."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.lifecycle import trim_heap
from tests.support.fake_clock import FakeClock
from workers.engine.decode.memory_pressure import (
    READING_INTERVAL_S,
    LinuxMemory,
    MacMemory,
    MemoryMonitor,
    MemoryReading,
    Pressure,
    is_out_of_memory,
    memory_reader,
)

GB = 10**9


@pytest.mark.parametrize(
    ("used_gb", "kernel_critical", "pressure", "excess_gb"),
    [
        (0, False, Pressure.NORMAL, 0),
        (84.9, False, Pressure.NORMAL, 0),
        (85, False, Pressure.HIGH, 0),
        (94, False, Pressure.HIGH, 9),
        (95, False, Pressure.CRITICAL, 10),
        (120, False, Pressure.CRITICAL, 35),
        (3, True, Pressure.CRITICAL, 0),
    ],
)
def test_the_pressure_follows_from_the_share_in_use_and_the_level_of_the_kernel(
    used_gb: float, kernel_critical: bool, pressure: Pressure, excess_gb: float
) -> None:
    used: Any = {"used_bytes": int(used_gb * GB)}
    reading = MemoryReading(**used, limit_bytes=100 * GB, kernel_critical=kernel_critical)
    assert (reading.pressure, reading.excess_bytes) == (pressure, excess_gb * GB)
    unlimited = MemoryReading(**used)
    assert (unlimited.pressure, unlimited.excess_bytes) == (Pressure.NORMAL, 0)


def test_a_monitor_reads_at_most_once_an_interval_and_at_once_if_asked() -> None:
    clock, used = FakeClock(), iter(range(1, 10))
    monitor = MemoryMonitor(lambda: MemoryReading(used_bytes=next(used)), clock)

    assert [monitor.reading().used_bytes for _ in range(3)] == [1, 1, 1]
    clock.advance(READING_INTERVAL_S)
    assert monitor.reading().used_bytes == 2
    assert monitor.reading(fresh=True).used_bytes == 3
    assert monitor.reading().used_bytes == 3


def test_a_reading_that_fails_is_logged_and_means_no_pressure(caplog) -> None:
    def fail() -> MemoryReading:
        raise OSError(5, "no reading")

    assert MemoryMonitor(fail).reading().pressure is Pressure.NORMAL
    assert "memory.unreadable" in caplog.text


def test_a_failed_allocation_lowers_the_room_and_answers_raise_it_to_what_was_measured() -> None:
    monitor = MemoryMonitor()
    assert monitor.room_bytes(1000) == 1000

    monitor.record_failed_allocation(900)
    assert monitor.room_bytes(1000) == 720
    monitor.record_failed_allocation(800)
    assert monitor.room_bytes(1000) == 576

    rooms = []
    for _ in range(60):
        monitor.record_answer(1000)
        rooms.append(monitor.room_bytes(1000))
    assert rooms == sorted(rooms)
    assert rooms[0] == 586
    assert rooms[-1] == 1000
    assert monitor.failed_allocations == 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[METAL] Command buffer execution failed: Insufficient Memory "
            "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
        ),
        RuntimeError(
            "[metal::malloc] Attempting to allocate 9000000000 bytes which is greater than the "
            "maximum allowed buffer size of 8589934592 bytes."
        ),
        RuntimeError("[malloc] Unable to allocate 8589934592 bytes."),
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
    ],
)
def test_the_words_of_mlx_for_a_failed_allocation_are_known(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError(str(error)))
    for words in ("[METAL] Command buffer execution failed: Internal Error (0000000e)", "a shape"):
        assert not is_out_of_memory(RuntimeError(words))


class SystemLibrary:
    """The C library of a Mac with chosen numbers, at the offsets of Apple's headers."""

    def __init__(self, *, footprint: int, wired_pages: int, level: int = 1) -> None:
        self.footprint = footprint
        self.wired_pages = wired_pages
        self.numbers = {
            b"hw.memsize": (64 * GB).to_bytes(8, "little"),
            b"kern.memorystatus_vm_pressure_level": level.to_bytes(4, "little"),
        }
        self.status = 0

    def mach_host_self(self) -> int:
        return 7

    def proc_pid_rusage(self, pid: int, flavor: int, buffer: Any) -> int:
        assert (pid, flavor, ctypes.sizeof(buffer._obj)) == (os.getpid(), 0, 96)
        ctypes.memmove(ctypes.addressof(buffer._obj) + 72, self.footprint.to_bytes(8, "little"), 8)
        return self.status

    def host_statistics64(self, host: int, flavor: int, words: Any, count: Any) -> int:
        assert (host, flavor) == (7, 4)
        assert count._obj.value * 4 == ctypes.sizeof(words._obj) >= 38 * 4
        words._obj[3] = self.wired_pages
        return 0

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: Any) -> int:
        number = self.numbers[name]
        assert (size._obj.value, new, new_size.value) == (len(number), None, 0)
        ctypes.memmove(ctypes.addressof(value._obj), number, len(number))
        return 0


def test_on_a_mac_the_limit_is_the_working_set_or_what_others_have_not_wired() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    system = SystemLibrary(footprint=30 * GB, wired_pages=34 * GB // page)
    memory = MacMemory(48 * GB, system)

    assert memory.read() == MemoryReading(used_bytes=30 * GB, limit_bytes=48 * GB)
    system.wired_pages = 52 * GB // page  # others have wired 22 GB of 64
    reading = memory.read()
    assert reading.limit_bytes == pytest.approx(42 * GB, abs=page)
    assert reading.pressure is Pressure.NORMAL
    system.footprint = 40 * GB  # and then 12 GB
    assert memory.read().limit_bytes == 48 * GB


def test_on_a_mac_the_level_4_of_the_kernel_is_critical_and_a_failed_call_raises() -> None:
    for level, pressure in ((1, Pressure.NORMAL), (2, Pressure.NORMAL), (4, Pressure.CRITICAL)):
        system = SystemLibrary(footprint=GB, wired_pages=1, level=level)
        assert MacMemory(48 * GB, system).read().pressure is pressure
    memory = MacMemory(48 * GB, system)
    system.status = -1
    with pytest.raises(OSError, match="failed"):
        memory.read()


OLD_LIMIT = "memory/memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("groups", "limits", "limit_bytes"),
    [
        ("0::/\n", {"memory.max": "4000000000"}, 4 * GB),
        ("0::/a/b\n", {"a/memory.max": "3000000000", "a/b/memory.max": "max"}, 3 * GB),
        ("0::/../x\n", {"memory.max": "3000000000"}, 3 * GB),
        ("4:cpu,memory:/docker/1\n1:cpu:/\n0::/\n", {OLD_LIMIT: "2000000000"}, 2 * GB),
        ("4:memory:/\n", {OLD_LIMIT: "9223372036854771712"}, 5 * GB),
        ("", {}, 5 * GB),
    ],
)
def test_on_linux_the_limit_is_the_least_of_device_machine_and_control_groups(
    tmp_path: Path, groups: str, limits: dict[str, str], limit_bytes: int
) -> None:
    process = tmp_path / "proc" / "self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(groups)
    (process / "status").write_text(
        "VmRSS:\t 900 kB\nRssAnon:\t     600 kB\nRssFile:\t 270 kB\nRssShmem:\t 30 kB\n"
        "VmSwap:\t    10 kB\n"
    )
    for name, text in limits.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    memory = LinuxMemory(5 * GB, tmp_path / "proc", tmp_path / "groups")

    assert memory.read() == MemoryReading(used_bytes=640 << 10, limit_bytes=limit_bytes)


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no readings elsewhere")
def test_the_footprint_of_this_process_grows_by_what_it_allocates() -> None:
    read = memory_reader(1 << 60)
    before = read()
    held = bytearray(b"x" * (16 << 20))
    after = read()

    assert 0 < before.used_bytes < before.limit_bytes
    assert after.used_bytes - before.used_bytes > 0.9 * len(held)


def test_memory_that_was_freed_between_blocks_in_use_goes_back_to_the_system() -> None:
    system = ctypes.CDLL(None)
    if not hasattr(system, "malloc_trim"):
        pytest.skip("the allocator is not glibc's")
    system.malloc.restype = ctypes.c_void_p
    size_bytes, count, read = 4096, 5_000, LinuxMemory(GB).read
    blocks = [system.malloc(ctypes.c_size_t(size_bytes)) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size_bytes)
    last = blocks.pop()  # in use, above all others: they stay with the process
    for block in blocks:
        system.free(ctypes.c_void_p(block))
    before_bytes = read().used_bytes
    trim_heap()
    assert read().used_bytes < before_bytes - count * size_bytes / 2
    system.free(ctypes.c_void_p(last))
