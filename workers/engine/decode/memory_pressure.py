"""Memory pressure: the share of the machine's memory that this process uses, and its consequences.

Metal does not page: a Mac whose memory is full stalls, ends processes, or panics as a whole
(jundot/omlx#300, #862, #978, #1372). What MLX has allocated says too little: it omits buffers that
the driver keeps, and everything else in the process. The kernel's own count of a process, by which
it selects what to end, is the footprint (`phys_footprint`). It is compared with the lesser of two
limits: the working set that Metal recommends, and the physical memory less what others have wired.

From `HIGH_SHARE` of that limit on, new rows wait and caches are given back; from `CRITICAL_SHARE`
on, or while the kernel itself reports critical pressure, requests are refused.

An allocation that fails all the same raises. Then all rows but the oldest are sent back, and the
rows of a worker get less memory than before, which every completed answer raises again: additive
increase, multiplicative decrease (Chiu and Jain 1989).
"""

import ctypes
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.protocol import CRITICAL_PRESSURE
from workers.engine.types import MemoryShort

logger = logging.getLogger(__name__)

HIGH_SHARE = 0.85
CRITICAL_SHARE = 0.95
READING_INTERVAL_S = 0.2
"""A reading is as old as this at most."""
LOWERED_SHARE = 0.8
"""Share of the rows' memory at a failed allocation; they get no more from then on."""
_RAISED_SHARE = 0.01
"""Of the memory for rows, by how much each completed answer raises that again."""


class Pressure(StrEnum):
    """How much of its memory a worker uses."""

    NORMAL = "normal"
    HIGH = "high"
    CRITICAL = CRITICAL_PRESSURE


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The memory of this process at one time."""

    used_bytes: int = 0
    """Footprint of the process."""
    limit_bytes: int = 0
    """Its limit; 0 if unknown."""
    kernel_critical: bool = False
    """Whether the kernel reports critical pressure, whoever takes the memory."""

    @property
    def pressure(self) -> Pressure:
        """Return the pressure."""
        share = self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0
        if self.kernel_critical or share >= CRITICAL_SHARE:
            return Pressure.CRITICAL
        return Pressure.HIGH if share >= HIGH_SHARE else Pressure.NORMAL

    @property
    def excess_bytes(self) -> int:
        """Return by how much the memory in use exceeds `HIGH_SHARE`; 0 if it does not."""
        return max(self.used_bytes - int(HIGH_SHARE * self.limit_bytes), 0) * bool(self.limit_bytes)

    def check(self) -> None:
        """Raise `MemoryShort` at critical pressure."""
        if self.pressure is Pressure.CRITICAL:
            raise MemoryShort(self.used_bytes, self.limit_bytes)


ReadMemory = Callable[[], MemoryReading]


class MemoryMonitor:
    """The memory of one worker: its last reading, and the room for rows after a failed allocation.

    A reading is safe from any thread; all else is for the engine thread only.
    """

    def __init__(
        self, read: ReadMemory = MemoryReading, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read by `read`, which must return within a millisecond; `clock` returns seconds."""
        self._read = read
        self._clock = clock
        self._reading = MemoryReading()
        self._read_s = -READING_INTERVAL_S
        self._room_bytes: float | None = None
        """None while the rows have all the memory that was measured for them."""
        self.failed_allocations = 0
        """Allocations that have failed since the start."""

    def reading(self, *, fresh: bool = False) -> MemoryReading:
        """Return the last reading, or a new one if that is old; with `fresh`, always a new one."""
        now_s = self._clock()
        if fresh or now_s >= self._read_s + READING_INTERVAL_S:
            self._read_s = now_s
            try:
                self._reading = self._read()
            except OSError:
                logger.warning("memory.unreadable", exc_info=True)
                self._reading = MemoryReading()
        return self._reading

    def room_bytes(self, measured_bytes: int) -> int:
        """Return the memory for the caches of all rows, with `measured_bytes` of it measured."""
        return measured_bytes if self._room_bytes is None else int(self._room_bytes)

    def record_failed_allocation(self, used_bytes: int) -> None:
        """Lower the memory for rows, after an allocation has failed while they used so much."""
        self.failed_allocations += 1
        before_bytes = used_bytes if self._room_bytes is None else self._room_bytes
        self._room_bytes = LOWERED_SHARE * min(used_bytes, before_bytes)

    def record_answer(self, measured_bytes: int) -> None:
        """Raise the memory for rows, up to the measured amount."""
        if self._room_bytes is not None:
            raised = self._room_bytes + _RAISED_SHARE * measured_bytes
            self._room_bytes = raised if raised < measured_bytes else None


_OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|insufficient memory|unable to allocate|maximum allowed buffer size",
    re.IGNORECASE,
)
"""Words of MLX for a failed allocation: of Metal's command buffers and allocator, and of CUDA's. On
a CPU nothing raises: the process ends."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation of the device has failed, and nothing else is wrong."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def memory_reader(device_limit_bytes: int) -> ReadMemory:
    """Return the reader of this machine's memory; `device_limit_bytes` is the limit of MLX."""
    try:
        if sys.platform == "darwin":
            return MacMemory(device_limit_bytes, ctypes.CDLL(None)).read
        if sys.platform == "linux":
            return LinuxMemory(device_limit_bytes).read
    except (OSError, AttributeError):
        logger.warning("memory.unreadable", exc_info=True)
    return MemoryReading


class _ResourceUsage(ctypes.Structure):
    """`struct rusage_info_v0` of `<sys/resource.h>`."""

    _fields_ = (
        ("uuid_times_wakeups_pages", ctypes.c_uint64 * 9),
        ("footprint_bytes", ctypes.c_uint64),
        ("start_and_exit_time", ctypes.c_uint64 * 2),
    )


class MacMemory:
    """The memory of a Mac, by three calls of libSystem that never wait."""

    _HOST_VM_INFO64 = 4
    _VM_STATISTICS_WORDS = 64
    """More than `struct vm_statistics64` has; its fourth word counts the wired pages."""
    _CRITICAL = 4
    """Of `kern.memorystatus_vm_pressure_level`; 1 is normal, 2 a warning."""

    def __init__(self, device_limit_bytes: int, system: Any) -> None:
        """Use `system`, the C library; raise `OSError` if it cannot report the physical memory."""
        self._system = system
        self._device_limit_bytes = device_limit_bytes
        self._host = system.mach_host_self()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._physical_bytes = self._control(b"hw.memsize", ctypes.c_uint64())

    def read(self) -> MemoryReading:
        """Return a reading; raise `OSError` if the system refuses one."""
        usage = _ResourceUsage()
        self._check(self._system.proc_pid_rusage(os.getpid(), 0, ctypes.byref(usage)))
        used_bytes = usage.footprint_bytes
        # What Metal wires is in no count of this process. All that it has may be wired, since the
        # engine asks for that; the rest is wired by others.
        others_bytes = max(self._wired_bytes() - used_bytes, 0)
        level = self._control(b"kern.memorystatus_vm_pressure_level", ctypes.c_uint32())
        return MemoryReading(
            used_bytes=used_bytes,
            limit_bytes=max(min(self._device_limit_bytes, self._physical_bytes - others_bytes), 1),
            kernel_critical=level >= self._CRITICAL,
        )

    def _wired_bytes(self) -> int:
        words = (ctypes.c_uint32 * self._VM_STATISTICS_WORDS)()
        count = ctypes.c_uint32(len(words))
        self._check(
            self._system.host_statistics64(
                self._host, self._HOST_VM_INFO64, ctypes.byref(words), ctypes.byref(count)
            )
        )
        return words[3] * self._page_bytes

    def _control(self, name: bytes, value: ctypes.c_uint32 | ctypes.c_uint64) -> int:
        """Return a number of `sysctl`."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._check(
            self._system.sysctlbyname(
                name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
            )
        )
        return value.value

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise OSError(status, "A call of the system failed.")


class LinuxMemory:
    """The memory of a Linux machine or container: no file, and no page that a file backs, counts.

    The kernel has no level of pressure there.
    """

    _USED = re.compile(rb"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", re.MULTILINE)

    def __init__(
        self,
        device_limit_bytes: int,
        proc: Path = Path("/proc"),
        groups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        """Read the limits of the machine and of its control groups once."""
        self._status = proc / "self" / "status"
        physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limits = _group_limits((proc / "self" / "cgroup").read_text(), groups)
        self._limit_bytes = min(device_limit_bytes, physical_bytes, *limits)

    def read(self) -> MemoryReading:
        """Return a reading; raise `OSError` if the system refuses one."""
        used_bytes = sum(map(int, self._USED.findall(self._status.read_bytes()))) << 10
        return MemoryReading(used_bytes=used_bytes, limit_bytes=self._limit_bytes)


def _group_limits(text: str, groups: Path) -> list[int]:
    """Return the limits of all control groups above this process, of both versions."""
    limits = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that of the host, and the group the root.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / name
            if file.is_file() and (limit := file.read_text().strip()).isdecimal():
                limits.append(int(limit))
            if folder == root:
                break
    return limits
