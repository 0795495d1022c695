"""Admission: the rows of all lanes within the memory of one worker.

A row is read once the caches of all rows, each grown a little, fit into the memory that was
measured for them. While the memory of the machine is short (`memory_pressure.py`), new rows wait
and caches are given back.
"""

from collections.abc import Iterable

import mlx.core as mx

from paceline.lifecycle import trim_heap
from workers.engine.decode.decoder import Decoder
from workers.engine.decode.memory_pressure import MemoryMonitor, MemoryReading, Pressure
from workers.engine.decode.row import Row
from workers.engine.lane.memory import MemoryEstimate
from workers.engine.lane.prefill_queue import PrefillQueue
from workers.engine.model.target import Target
from workers.engine.prefix.cache import PrefixCache

GROWTH_TOKENS = 256
"""Growth reserved for each row when another one joins, to avoid an early preemption."""


class Admission:
    """The memory of an engine, and the rows of its lanes that take it."""

    def __init__(
        self,
        target: Target,
        memory: MemoryEstimate,
        prefix_cache: PrefixCache,
        monitor: MemoryMonitor | None = None,
    ) -> None:
        self.memory = memory
        self.prefix_cache = prefix_cache
        self.monitor = monitor or MemoryMonitor()
        self.prefills = PrefillQueue()
        self.decoder: Decoder
        """That of the same engine (`EngineParts`)."""
        self._target = target
        self._relieved: MemoryReading | None = None
        """The reading after caches were last given back."""

    @property
    def short(self) -> bool:
        """Return whether the memory of the machine is short."""
        return self.monitor.reading().pressure is not Pressure.NORMAL

    def rows_by_batch(self, newcomers: Iterable[Row] = ()) -> list[list[Row]]:
        """Return the rows with caches, by the batch that they are in or will join."""
        in_prefill = (prefill.row for prefill in self.prefills)
        return self.decoder.rows_by_batch(*in_prefill, *newcomers)

    def rows(self) -> list[Row]:
        """Return the rows of all lanes that have caches."""
        return [row for rows in self.rows_by_batch() for row in rows]

    def has_room(self, row: Row) -> bool:
        """Return whether a row may be read now; one without others always may.

        The engine has rejected prompts that exceed the memory.
        """
        if not self.rows():
            return True
        return not self.short and self.free_bytes(row, growth_tokens=GROWTH_TOKENS) >= 0

    def free_bytes(self, *newcomers: Row, growth_tokens: int = 0) -> int:
        """Return the bytes that the rows of all lanes leave, each grown by `growth_tokens`."""
        used_bytes = self.used_bytes(*newcomers, growth_tokens=growth_tokens)
        return self.monitor.room_bytes(self.memory.room_bytes) - used_bytes

    def used_bytes(self, *newcomers: Row, growth_tokens: int = 0) -> int:
        """Return the bytes that the rows of all lanes take, each grown by `growth_tokens`."""
        memory, batches = self.memory, self.rows_by_batch(newcomers)
        tokens = [[row.slots_after(growth_tokens) for row in rows] for rows in batches]
        unread = (*(prefill.row for prefill in self.prefills), *newcomers)
        longest = max((row.slots_used for row in unread), default=0)
        used_bytes = memory.batch_cache_bytes(tokens) + memory.reading_bytes(longest)
        return used_bytes + sum(
            memory.step_bytes(drafts=row.draft_tokens > 0) for rows in batches for row in rows
        )

    def relieve(self) -> None:
        """Give back caches while the memory of the machine is short, once for each reading.

        Freed memory goes first, then as many cached prefixes as exceed the limit.
        """
        reading = self.monitor.reading()
        if reading is self._relieved or reading.pressure is Pressure.NORMAL:
            return
        mx.clear_cache()
        trim_heap()
        reading = self.monitor.reading(fresh=True)
        if reading.pressure is Pressure.CRITICAL:
            self.give_back(0)
        elif reading.excess_bytes:
            self.give_back(max(self.prefix_cache.size_bytes - reading.excess_bytes, 0))
        self._relieved = self.monitor.reading(fresh=True)

    def give_back(self, kept_bytes: int) -> None:
        """Give back cached prefixes but for `kept_bytes`, features of pictures, and buffers."""
        self.prefix_cache.evict_to(kept_bytes)
        self._target.picture_features.drop(None)
        mx.clear_cache()
        trim_heap()
