"""The engines that send no heartbeats: found out, probed, and asked for their models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

import httpx
from pydantic_core import to_json

from gateway.config.static_workers import StaticWorker
from gateway.engines import KINDS, detect
from gateway.engines.base import EngineSilent, EngineUnusable, HttpAnswer, Question
from gateway.engines.openai import OpenAIEngine
from gateway.errors import WorkerIdTaken
from gateway.fleet.health import TIMEOUTS, fetch
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S, WorkerRegistry
from gateway.periodic import Job
from gateway.state.shared_counters import CounterStore
from paceline.http import certificate_authorities
from paceline.protocol import MTP_LANE, LaneReport, WorkerReport

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
"""For each question to an engine, and for all those about its models: a list may take long."""
_READ_INTERVAL_S = 10.0
# An engine that takes connections and answers no probe for so long is taken for dead.
_GRACE_S = 30.0
BOOT_ID = "static"
_FIRST_PROBE_S = 1.0
_NEVER_S = float("-inf")
_FORBIDDEN = frozenset((401, 403))


@dataclass(slots=True, kw_only=True, eq=False)
class WatchedEngine:
    """One engine of the settings or of an admin."""

    entry: StaticWorker
    token: str = field(default="", repr=False)
    """Its API key; empty if it needs none."""
    problem: str = ""
    """Why the engine gets no requests, for admins; empty if it does."""
    missing_key: bool = False
    """The variable of its key is not set here, so that the engine is not asked."""
    engine: OpenAIEngine | None = None
    """None until the engine is found out."""
    read_at_s: float = _NEVER_S
    """The time of the last answer about its models."""
    answered_at_s: float = _NEVER_S
    """The time of the last answer to a probe."""

    @property
    def report(self) -> WorkerReport:
        """Return the report that the engine would send: one lane for each pool."""
        engine, entry = self.engine, self.entry
        assert engine is not None, "the engine has not been found out"
        state = engine.state
        pools = entry.pools or engine.default_pools
        if state.drafts and not entry.pools and MTP_LANE not in pools:
            pools = (MTP_LANE, *pools)
        slots = entry.slots or state.slots or engine.default_slots
        lanes = [
            LaneReport(name=pool, slots=slots, mtp_enabled=pool == MTP_LANE)
            for pool in dict.fromkeys(pools)
        ]
        if state.speculation is not None:
            lanes[0] = lanes[0].model_copy(
                update={"mtp_enabled": True, "speculation": state.speculation}
            )
        names = tuple(engine.names)
        return WorkerReport(
            worker_id=entry.id,
            boot_id=BOOT_ID,
            url=entry.url,
            model=names[0],
            context_tokens=engine.model(names[0]).context_tokens,
            labels=entry.labels,
            lanes=tuple(lanes),
        )


class EngineWatch:
    """Probes engines; a successful probe counts as a heartbeat. An async context.

    `clock` returns monotonic seconds.
    """

    def __init__(
        self, fleet: WorkerRegistry, store: CounterStore, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._clock = clock
        self._probes: dict[str, asyncio.Task[None]] = {}
        self.engines: dict[str, WatchedEngine] = {}
        """By the id of the worker."""
        self._client = httpx.AsyncClient(
            # Not compressed: a small response could hold a large list.
            headers={"accept-encoding": "identity"},
            timeout=READ_TIMEOUT_S,
            verify=certificate_authorities(),
            follow_redirects=False,  # a redirect would take the key of the engine elsewhere
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        """Find out the engines that answer at once, so that the gateway serves with them."""
        await self._client.__aenter__()
        await self.probe_all()
        if self._probes:
            await asyncio.wait(self._probes.values(), timeout=_FIRST_PROBE_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        probes = tuple(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await self._client.aclose()

    def job(self) -> Job:
        """Return the periodic job that starts the probes."""
        return Job(work=self.probe_all, period_s=HEARTBEAT_INTERVAL_S)

    def replace(self, engines: Iterable[WatchedEngine]) -> None:
        """Watch these engines and no others; unchanged ones keep their state."""
        wanted = {one.entry.id: one for one in engines}
        for worker_id, old in tuple(self.engines.items()):
            new = wanted.get(worker_id)
            if new is not None and (new.entry, new.token) == (old.entry, old.token):
                wanted[worker_id] = old
            else:
                self._stop(worker_id)
        self.engines = wanted

    async def probe_all(self) -> None:
        """Start a probe of each engine without a running one, so that none delays another.

        A probe may last longer than a worker lives without a heartbeat.
        """
        for worker_id, watched in tuple(self.engines.items()):
            running = self._probes.get(worker_id)
            if running is not None and not running.done():
                if self._is_live(watched) and self._works(watched):
                    await self._heartbeat(watched)
            elif not watched.missing_key:
                self._probes[worker_id] = asyncio.create_task(
                    self.probe(watched), name=f"probe {worker_id}"
                )

    async def probe_now(self, worker_id: str) -> None:
        """Probe one engine, or await the probe of it that runs."""
        await self.probe_all()
        if (probe := self._probes.get(worker_id)) is not None:
            await asyncio.wait((probe,))

    async def probe(self, watched: WatchedEngine) -> None:
        """Probe an engine once, record a heartbeat if it is healthy, and log a change."""
        try:
            problem = await self._check(watched)
        except EngineUnusable as unusable:
            problem = str(unusable)
        except EngineSilent as silent:
            if watched.entry.kind == "auto" and not self._is_live(watched):
                watched.engine = None  # another engine may start at this URL
            problem = f"The engine does not answer: {silent}."
        except Exception:  # one engine must not stop the probes
            log.exception("engine.probe_failed worker=%s", watched.entry.id)
            problem = "The gateway cannot read the engine's answers."
        if self.engines.get(watched.entry.id) is not watched:
            return
        if problem and not watched.problem:
            log.warning("worker.unhealthy worker=%s reason=%s", watched.entry.id, problem)
        elif watched.problem and not problem:
            log.info("worker.healthy worker=%s", watched.entry.id)
        watched.problem = problem

    async def examine(self, watched: WatchedEngine) -> None:
        """Find out an engine and its models; raise `EngineSilent` or `EngineUnusable`."""
        await self._read(watched, await self._engine(watched))

    async def _check(self, watched: WatchedEngine) -> str:
        """Return why an engine gets no requests; empty if it does."""
        engine = await self._engine(watched)
        busy = False
        try:
            answer = await self._ask(watched, engine.health)
        except EngineSilent as silent:
            busy = silent.timed_out and self._works(watched)
            if not busy:
                raise
        else:
            watched.answered_at_s = self._clock()
            # Not every server has the path, but a rejected API key fails every request.
            if answer.status >= 500 or answer.status in _FORBIDDEN:
                return f"The engine answers with status {answer.status}."
        if engine.names and self._is_live(watched):
            await self._heartbeat(watched)
        if not busy and self._clock() - watched.read_at_s >= _READ_INTERVAL_S:
            await self._read(watched, engine)
        if not engine.names:
            return "The engine does not have any of its configured models."
        return await self._heartbeat(watched)

    def _works(self, watched: WatchedEngine) -> bool:
        """Return whether an engine that answers no probe may work all the same.

        A server with one thread answers none while it works on a request, of others too and of a
        client that has left. The timeouts of requests show whether it still works.
        """
        worker = self._fleet.get(watched.entry.id)
        answered_at_s = max(watched.answered_at_s, worker.answered_at_s if worker else _NEVER_S)
        recent = self._clock() - answered_at_s < _GRACE_S
        return recent or (worker is not None and worker.in_flight.total() > 0)

    async def _engine(self, watched: WatchedEngine) -> OpenAIEngine:
        """Return an engine, which is found out first if need be."""
        if watched.engine is not None:
            return watched.engine
        kind = watched.entry.kind
        if kind == "auto":
            engine_class = await detect(lambda question: self._ask(watched, question))
            log.info("engine.detected worker=%s kind=%s", watched.entry.id, engine_class.kind)
        else:
            engine_class = KINDS[kind]
        watched.engine = engine_class(
            watched.token, watched.entry.names, cache_salt=watched.entry.cache_salt
        )
        watched.read_at_s = _NEVER_S
        return watched.engine

    async def _read(self, watched: WatchedEngine, engine: OpenAIEngine) -> None:
        """Ask an engine for its models and counts."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                state = await engine.read(lambda question: self._ask(watched, question))
        except TimeoutError:
            why = f"no list of models within {READ_TIMEOUT_S:g} s"
            raise EngineSilent(why, timed_out=True) from None
        engine.update(state)
        watched.read_at_s = self._clock()

    async def _heartbeat(self, watched: WatchedEngine) -> str:
        """Record a heartbeat; return why that is impossible, empty if it is not."""
        report = watched.report
        if self.engines.get(watched.entry.id) is not watched:
            return ""  # removed meanwhile
        try:
            self._fleet.heartbeat(report, watched.engine)
        except WorkerIdTaken:
            return "Another worker has joined with this id."
        told = watched.engine is not None and watched.engine.state.speculation is not None
        # What is stored counts: a lane whose engine tells no drafts has no count of them.
        lanes = tuple(
            lane.model_copy(update={"mtp_enabled": told and lane.mtp_enabled})
            for lane in report.lanes
        )
        await self._store.store_report(report.model_copy(update={"lanes": lanes}))
        return ""

    def _is_live(self, watched: WatchedEngine) -> bool:
        worker = self._fleet.get(watched.entry.id)
        return worker is not None and worker.backend is watched.engine

    def _stop(self, worker_id: str) -> None:
        """Stop watching an engine, which gets no further requests."""
        if (probe := self._probes.pop(worker_id, None)) is not None:
            probe.cancel()
        watched = self.engines.pop(worker_id)
        if self._is_live(watched):
            self._fleet.remove(worker_id)

    async def _ask(self, watched: WatchedEngine, question: Question) -> HttpAnswer:
        """Ask an engine in the name of the gateway, twice if the connection breaks."""
        url = watched.entry.url + question.path
        headers = {"authorization": f"Bearer {watched.token}"} if watched.token else {}
        method, content = "GET", None
        if question.body is not None:
            method, content = "POST", to_json(question.body)
            headers["content-type"] = "application/json"
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                response, body = await fetch(self._client, method, url, headers, content)
        except TIMEOUTS:
            why = f"no answer to {method} {question.path} within {READ_TIMEOUT_S:g} s"
            raise EngineSilent(why, timed_out=True) from None
        except Exception as error:  # noqa: BLE001  # the client library raises arbitrary errors
            why = type(error).__name__  # its words may be those of the engine
            log.debug("engine.silent worker=%s error=%s", watched.entry.id, why)
            unheard = isinstance(error, httpx.ConnectError)
            raise EngineSilent("nothing listens at its URL" if unheard else "no HTTP") from None
        names = {name.lower(): value for name, value in response.headers.items()}
        return HttpAnswer(response.status_code, names, body.decode(errors="replace"))
