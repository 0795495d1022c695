"""The state of one worker: its identity, its start, its engine and the requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic

from typing_extensions import TypeVar

from paceline.protocol import (
    KEEPALIVE_S,
    MAX_HELD_PREFIXES,
    MAX_REPORTED_PREFIXES,
    PROTOCOL,
    StartProgress,
    StartStage,
    WorkerReport,
)
from workers.server.engines import RunningEngine, ServingEngine
from workers.server.errors import WorkerDraining
from workers.server.pictures import PictureMemory

_PAGE_S = 2.0
"""Time between two heartbeats."""


class Traffic:
    """The number of requests in flight; draining rejects new ones."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False

    @contextmanager
    def admit(self, *, even_draining: bool = False) -> Iterator[None]:
        """Count a request in flight within the context.

        Raise `WorkerDraining` while draining, unless `even_draining`.
        """
        if self.draining and not even_draining:
            raise WorkerDraining
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()


@dataclass(slots=True, kw_only=True)
class StartingWorker:
    """A worker whose engine is not loaded yet: it serves nothing, and reports how far it is."""

    worker_id: str
    boot_id: str
    url: str
    model: str
    labels: tuple[str, ...] = ()
    clock: Callable[[], float]
    """Monotonic time in seconds."""
    started_s: float
    step: tuple[StartStage, int, int]
    """How far the start is: the stage, and the parts of it that are done, of how many."""

    def advance(self, stage: StartStage, done: int, total: int) -> None:
        """Record how far the start is; safe from any thread."""
        self.step = (stage, done, total)

    def progress(self) -> StartProgress:
        """Return how far the start is."""
        stage, done, total = self.step
        elapsed_s = self.clock() - self.started_s
        return StartProgress(stage=stage, done=done, total=total, elapsed_s=elapsed_s)

    def report(self) -> WorkerReport:
        """Return a report without lanes."""
        return WorkerReport(
            worker_id=self.worker_id,
            boot_id=self.boot_id,
            protocol=PROTOCOL,
            url=self.url,
            model=self.model,
            labels=self.labels,
            context_tokens=0,
            ready=False,
            start=self.progress(),
            lanes=(),
        )


EngineT = TypeVar("EngineT", bound=RunningEngine, default=ServingEngine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker(Generic[EngineT]):
    """One running worker, shared by all routes."""

    worker_id: str
    """Stable over restarts."""
    boot_id: str
    """New at every start."""
    url: str
    labels: tuple[str, ...] = ()
    engine: EngineT
    clock: Callable[[], float]
    """Wall time in seconds."""
    started_s: float
    traffic: Traffic = field(default_factory=Traffic)
    pictures: PictureMemory = field(default_factory=PictureMemory)
    keepalive_s: float = KEEPALIVE_S
    """The longest time without an event before a stream gets a comment, or its head."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to send the next heartbeat at once."""

    @property
    def ready(self) -> bool:
        """Whether the worker accepts new requests."""
        return self.engine.ready and not self.traffic.draining

    def drain(self) -> None:
        """Reject new requests from now on, and report that to the gateway."""
        self.traffic.draining = True
        self.changed.set()

    def report(self) -> WorkerReport:
        """Return one consistent snapshot of the worker."""
        card = self.engine.card
        state, memory = self.engine.state(), self.engine.memory_reading()
        return WorkerReport(
            worker_id=self.worker_id,
            boot_id=self.boot_id,
            protocol=PROTOCOL,
            url=self.url,
            model=card.model,
            labels=self.labels,
            fingerprint=card.fingerprint,
            context_tokens=card.context_tokens,
            group_size=card.group_size,
            default_max_tokens=card.default_max_tokens or card.context_tokens,
            sampling=card.sampling,
            constrains_calls=card.constrains_calls,
            system_inside=card.system_inside,
            sees_pictures=card.vision,
            ready=self.ready,
            draining=self.traffic.draining,
            memory_bytes=state.memory_bytes,
            memory_limit_bytes=state.memory_limit_bytes,
            footprint_bytes=memory.used_bytes,
            footprint_limit_bytes=memory.limit_bytes,
            memory_pressure=memory.pressure,
            failed_allocations=state.failed_allocations,
            prefix_cache_bytes=state.prefix_cache_bytes,
            prefixes=state.prefixes[:MAX_REPORTED_PREFIXES],
            held_prefixes=_in_turn(state.prefixes[MAX_REPORTED_PREFIXES:], self.clock()),
            prefix_count=len(state.prefixes),
            evicted_prefixes=state.evicted_prefixes[:MAX_REPORTED_PREFIXES],
            lanes=self.engine.lane_reports(),
        )


def _in_turn(keys: Sequence[str], now_s: float) -> tuple[str, ...]:
    """Return as many keys as a report may have; all come within some intervals."""
    pages = -(-len(keys) // MAX_HELD_PREFIXES)
    if pages < 2:
        return tuple(keys)
    begin = int(now_s / _PAGE_S) % pages * MAX_HELD_PREFIXES
    return tuple(sorted(keys)[begin : begin + MAX_HELD_PREFIXES])
