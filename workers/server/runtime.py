"""The worker as a whole: who it is, the engine it runs, and what it has in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from workers.protocol import MAX_REPORTED_PREFIXES, WorkerReport
from workers.server.errors import WorkerDraining
from workers.server.ports import ServingEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a worker is known by; a boot is one life of it."""

    worker_id: str
    boot_id: str
    url: str
    labels: tuple[str, ...] = ()


class Traffic:
    """Counts the answers in hand; draining lets none in and waits for the last."""

    def __init__(self) -> None:
        self._in_hand = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold one answer in hand; raise `WorkerDraining` when none is taken any more."""
        if self.draining:
            raise WorkerDraining
        self._in_hand += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_hand -= 1
            if not self._in_hand:
                self._idle.set()

    async def idle(self) -> None:
        """Return once no answer is in hand."""
        await self._idle.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One running worker; built once, handed to every route."""

    identity: Identity
    engine: ServingEngine
    clock: Callable[[], float]
    """Wall time in seconds."""
    started_s: float
    traffic: Traffic = field(default_factory=Traffic)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gateway should hear of it before the next beat is due."""

    @property
    def ready(self) -> bool:
        """Say whether a new request would be taken."""
        return self.engine.alive and not self.traffic.draining

    def drain(self) -> None:
        """Take nothing new from now on, and let the gateway know."""
        self.traffic.draining = True
        self.changed.set()

    def report(self) -> WorkerReport:
        """Read one consistent snapshot of everything others may know."""
        card = self.engine.card
        prefixes = self.engine.prefixes()
        return WorkerReport(
            worker_id=self.identity.worker_id,
            boot_id=self.identity.boot_id,
            url=self.identity.url,
            model=card.model,
            labels=self.identity.labels,
            context_tokens=card.context_tokens,
            ready=self.ready,
            draining=self.traffic.draining,
            memory_bytes=self.engine.memory_bytes(),
            memory_limit_bytes=self.engine.memory_limit_bytes(),
            prefix_cache_bytes=self.engine.prefix_cache_bytes(),
            prefixes=prefixes[:MAX_REPORTED_PREFIXES],
            prefix_count=len(prefixes),
            lanes=self.engine.lane_reports(),
        )
