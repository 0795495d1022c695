"""The gateway: its parts, built, started and closed in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tenacity import AsyncRetrying, retry_if_exception_cause_type, stop_after_delay

from gateway.auth.api_keys import ApiKeys, missing_pools
from gateway.auth.key_store import KeyStore
from gateway.auth.usage_store import UsageStore
from gateway.cluster.rate_limits import SharedRateLimits
from gateway.cluster.sync import ClusterSync, PeerWorkers
from gateway.config.policy_file import LastReads, PolicyFileWatcher, read_source
from gateway.config.policy_store import PolicyStore
from gateway.config.policy_versions import Reason
from gateway.config.settings import Settings
from gateway.config.startup_checks import check_binding
from gateway.config.static_workers import check_unique_ids, read_worker_key
from gateway.documents.reader import DocumentReader
from gateway.engines.paceline import PacelineWorker
from gateway.errors import RecordsUnwritable, StartupError
from gateway.fleet.cordons import Cordons
from gateway.fleet.engine_records import EngineRecords
from gateway.fleet.engine_watch import EngineWatch, WatchedEngine
from gateway.fleet.health import ReportClient
from gateway.fleet.known_workers import KnownWorkers
from gateway.fleet.prefix_deletion import PrefixDeletion
from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.scheduler import Scheduler
from gateway.http.downstream import ActiveRequests
from gateway.inspection_thread import InspectionThread
from gateway.memory_budget import MEMORY_LIMIT_BYTES, MemoryBudget
from gateway.pairing.codes import PairingCodes
from gateway.pairing.paired_workers import PairedWorkers
from gateway.periodic import Job, WeekClock, Work, periodic_tasks
from gateway.protocols.sealing import Sealer
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.prefix_keys import PrefixHasher
from gateway.routing.replay import RecentRequests
from gateway.state.counters import MemoryCounters
from gateway.state.expiring import ExpiringRecords, MemoryRecords, SharedExpiringRecords
from gateway.state.join_token import SharedJoinToken
from gateway.state.prefix_claims import SharedPrefixClaims
from gateway.state.recent_errors import RecentErrors, SharedErrors
from gateway.state.records import FileRecords, Records, RedisRecords
from gateway.state.redis import ADMIN_DEADLINE_S, DEADLINE_S, RedisClient
from gateway.state.shared_counters import CounterStore, SharedCounters
from gateway.state.worker_reports import SharedWorkerReports
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.stats import SNAPSHOT_INTERVAL_S, SnapshotHistory
from paceline.http import CHECK_S, paired_tls
from paceline.installation import install_command
from paceline.lifecycle import TRIM_INTERVAL_S, Shutdown, first_of, trim_heap
from paceline.protocol import KEEPALIVE_S
from policies.document import PolicyDocument, PolicyInvalid, Problem

if TYPE_CHECKING:
    from gateway.telemetry.tracing import Traces


LOOP_CHECK_S = 0.25
_DELETION_S = 2.0
_POLICY_FILE_CHECK_S = 1.0
# Of the stored records at the start, which otherwise takes a few milliseconds.
_READING_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The clocks of a gateway, the time that it takes to share its state, and its memory."""

    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    wall: Callable[[], float] = time.time
    """Seconds since 1970."""
    refresh_s: float = 0.5
    """A gateway must reject a key within two seconds of its revocation by another one."""
    exchange_s: float = 0.5
    usage_flush_s: float = 5.0
    redis_deadline_s: float = DEADLINE_S
    redis_admin_deadline_s: float = ADMIN_DEADLINE_S
    check_s: float = CHECK_S
    """Time limits of connections are checked this often."""
    head_timeout_s: float = 15.0
    """For the headers of a request."""
    keepalive_s: float = KEEPALIVE_S
    """Without an event for this long, a stream gets a comment, or its head."""
    write_timeout_s: float = 30.0
    """For a client that leaves sent data unread."""
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES


TIMING = Timing()
"""That of a gateway in production."""


class Gateway:
    """The parts of one gateway, built and closed in order; `open` loads the stored state."""

    traces: Traces | None
    policy_store: PolicyStore
    policy_file: PolicyFileWatcher
    lame_duck = False
    """Load balancers should send requests elsewhere; `/readyz` answers 503."""
    draining = False
    """New requests are rejected; running ones go on."""

    def __init__(
        self, settings: Settings, redis: RedisClient | None, timing: Timing = TIMING
    ) -> None:
        self.settings, self.timing = settings, timing
        self.clock, self.wall = clock, wall = timing.clock, timing.wall
        self.began_s = clock()
        self.rng = Random()  # noqa: S311  # breaks ties between equal workers
        self.week_clock = WeekClock(wall)
        self.exit_stack = AsyncExitStack()
        """Closes the parts, the last one first; Redis is open from the start."""
        self._records = records = _records(settings, redis)
        join_token = settings.join_token.get_secret_value() if settings.join_token else ""
        # Gateways that share the token give one system prompt one name.
        secret = join_token.encode() or secrets.token_bytes(32)
        self.prefix_hasher, self.sealer = PrefixHasher(secret), Sealer(secret)
        self.memory = memory = MemoryBudget(timing.memory_limit_bytes)
        self.recent_requests, self.documents = RecentRequests(), DocumentReader(memory)
        self.inspection_thread = self.exit_stack.enter_context(InspectionThread())
        self._build_fleet(PacelineWorker(join_token))
        self.fleet_tls = paired_tls()
        paired = records, secret, self.fleet, self.paceline
        self.paired_workers = PairedWorkers(*paired, wall, tls=self.fleet_tls)
        self._build_accounts()
        if redis is None:
            self.counters: CounterStore = MemoryCounters(self.accounting.take_pending)
            self.control = ReportClient(self.paceline, self.fleet, self.counters, self.fleet_tls)
            self.expiring_records: ExpiringRecords = MemoryRecords(clock, memory)
            kept = FileRecords(settings.state_dir.expanduser() / "workers.json")
            place = kept, str(settings.port)
            known = KnownWorkers(*place, self.fleet, self.control, clock=clock, wall=wall)
            keep = (known.keep,)
            self.cluster_sync = ClusterSync(
                records, known.recall, exchanges=keep, final_exchanges=keep
            )
        else:
            self.expiring_records = SharedExpiringRecords(redis, self.sealer)
            self._join_cluster(redis, join_token)
        ticks = clock if redis is None else wall  # gateways have only the second one in common
        self.pairing_codes = PairingCodes(self.expiring_records, self.paired_workers, ticks)
        read_within_s = 2 * timing.refresh_s + 0.2  # even if one read is late
        self.cordons = Cordons(records, self.fleet, self.control, wall, read_within_s)
        callers, salt = self.api_keys.callers_since, self.prefix_hasher.cache_salt
        self.prefix_deletion = PrefixDeletion(self.fleet, self.control, callers, salt, wall)
        self.engine_watch = EngineWatch(self.fleet, self.counters, clock)
        self.engine_records = EngineRecords(
            records,
            _listed_engines(settings),
            self.engine_watch,
            self.fleet,
            environment=os.environ,
            wall=wall,
        )

    def _build_fleet(self, paceline: PacelineWorker) -> None:
        """Build the parts that track workers and give them requests."""
        listed = frozenset(name for one in self.settings.workers for name in one.names)
        self.paceline = paceline
        self.fleet = WorkerRegistry(self.clock, self.rng.random, listed, paceline)
        self.prefix_index = PrefixIndex(self.clock)
        self.scheduler = Scheduler(self.fleet, self.prefix_index, self.clock, self.rng)

    def _build_accounts(self) -> None:
        """Build the parts that track clients and their usage."""
        clock, wall, settings = self.clock, self.wall, self.settings
        self.usage_store = usage = UsageStore(self._records, wall, life=secrets.token_hex(4))
        self.active_requests = ActiveRequests()
        end = self.active_requests.cancel_keys
        secrets_ = settings.api_key, settings.admin_key
        self.api_keys = ApiKeys(*secrets_, clock, wall, usage.tokens_used, on_end=end)
        self.key_store = KeyStore(self._records, self.api_keys, wall)
        self.access_log = AccessLog(settings.access_log) if settings.access_log else None
        self.recent_errors = RecentErrors()
        self.accounting = Accounting(usage, self.recent_errors, self.access_log, wall)
        totals, outcomes = self.accounting.lane_totals, self.accounting.outcomes
        self.stats_history = SnapshotHistory(totals, outcomes, clock)

    def _join_cluster(self, redis: RedisClient, join_token: str) -> None:
        """Build the exchange of this gateway with others."""
        reports = SharedWorkerReports(redis)
        self.counters = counters = SharedCounters(redis, reports, self.accounting.take_pending)
        self.control = ReportClient(self.paceline, self.fleet, counters, self.fleet_tls)
        prefixes = self.prefix_index
        peers = PeerWorkers(reports, self.fleet, self.control, prefixes, clock=self.clock)
        limits = SharedRateLimits(redis, self.api_keys.rate_limiters, self.clock)
        claims = SharedPrefixClaims(redis, prefixes)
        recent_errors = SharedErrors(redis, self.recent_errors, self.wall)
        token = SharedJoinToken(redis, join_token)
        self.cluster_sync = ClusterSync(
            self._records,
            peers.exchange,
            redis=redis,
            join_token=token,
            rate_limits=limits,
            exchanges=(
                *(token.exchange, counters.exchange, limits.exchange, claims.exchange),
                *(peers.exchange, recent_errors.exchange, peers.probe_silent),
            ),
            final_exchanges=(counters.exchange, recent_errors.exchange, limits.leave),
        )

    async def open(self) -> None:
        """Load keys, usage, cordons and the policy; raise `StartupError`."""
        await self.cluster_sync.check()
        # A disk that wakes up, or a machine that starts, may take longer than one call may.
        reading = AsyncRetrying(
            retry=retry_if_exception_cause_type(TimeoutError),
            stop=stop_after_delay(_READING_LIMIT_S),
            reraise=True,
        )
        try:
            await reading(self._read_records)
        except RecordsUnwritable:
            raise StartupError("The gateway cannot read the stored keys and their usage.") from None
        check_binding(self.settings, keyed=self.api_keys.required)
        self.traces = _traces(self.settings)
        # Last of all that may prevent the start: it writes the first version.
        await self._open_policy()

    async def _read_records(self) -> None:
        await self.usage_store.open()
        await self.key_store.refresh()
        await self.cordons.refresh()
        await self.paired_workers.refresh()
        await self.engine_records.refresh()

    @contextlib.asynccontextmanager
    async def started(
        self, upstream: AbstractAsyncContextManager[object], jobs: Iterable[Job]
    ) -> AsyncIterator[None]:
        """Start the parts, run their jobs and these, and close all in reverse order.

        `upstream` is the context that holds the connections to workers.
        """
        async with self.exit_stack as stack:
            for part in (self.access_log, self.traces, upstream):
                if part is not None:
                    await stack.enter_async_context(part)
            await stack.enter_async_context(self.control.client)
            await stack.enter_async_context(self.control.paired_client)
            await stack.enter_async_context(self.engine_watch)
            for work in reversed((self.usage_store.flush, *self.cluster_sync.final_exchanges)):
                stack.push_async_callback(Job(work=work, period_s=0).run)
            await Job(work=self.cluster_sync.read_workers, period_s=0).run()
            await stack.enter_async_context(periodic_tasks([*jobs, *self._jobs()]))
            yield

    async def run_until_drained(
        self,
        shutdown: Shutdown,
        server: asyncio.Task[None],
        drained: Callable[[], Coroutine[object, object, object]],
        cut: Callable[[], None],
    ) -> None:
        """Serve until the shutdown is requested, then drain; return once the server may close.

        `drained` waits until no request runs; `cut` ends the requests that still run.
        """
        settings = self.settings
        try:
            await first_of(server, shutdown.requested.wait())
            self.lame_duck = True
            if shutdown.lame_duck:
                await first_of(server, shutdown.forced.wait(), timeout_s=settings.lame_duck_s)
            self.draining = not shutdown.restart  # the last requests of a restart are served
            await first_of(drained(), shutdown.forced.wait(), timeout_s=settings.drain_timeout_s)
        finally:
            self.lame_duck = self.draining = True
            cut()

    def _jobs(self) -> list[Job]:
        """List the periodic jobs of the parts."""
        timing = self.timing
        periods: tuple[tuple[Work, float], ...] = (
            (self.key_store.refresh, timing.refresh_s),
            (self.cordons.refresh, timing.refresh_s),
            (self.paired_workers.refresh, timing.refresh_s),
            (self.engine_records.refresh, timing.refresh_s),
            (self.policy_store.refresh, timing.refresh_s),
            (self.prefix_deletion.delete_ended, _DELETION_S),
            (self.expiring_records.drop_expired, _DELETION_S),
            (self.policy_file.check, _POLICY_FILE_CHECK_S),
            (self.usage_store.flush, timing.usage_flush_s),
            (self._records.probe, timing.usage_flush_s),
            (self.stats_history.record, SNAPSHOT_INTERVAL_S),
            (self.accounting.recent_usage.turn, SNAPSHOT_INTERVAL_S),
            (_trim_heap, TRIM_INTERVAL_S),
        )
        return [
            *(Job(work=work, period_s=period_s) for work, period_s in periods),
            *(Job(work=work, period_s=timing.exchange_s) for work in self.cluster_sync.exchanges),
            self.engine_watch.job(),
        ]

    async def _open_policy(self) -> None:
        def warnings(policy: PolicyDocument) -> list[Problem]:
            return missing_pools(self.api_keys.records.values(), policy, self.wall())

        settings = self.settings
        reads = LastReads(settings.state_dir.expanduser(), settings.policy)
        await reads.open()
        source = await asyncio.to_thread(read_source, settings.policy, reads.last)
        try:
            store = PolicyStore(self._records, settings.workers, source, self.wall, warnings)
            self.policy_store = await store.open(reads.last)
        except PolicyInvalid as invalid:
            raise StartupError(
                f"The policy that would be active is invalid: {invalid.reasons}. Correct "
                "it, or set PACELINE_POLICY to another file."
            ) from None
        except RecordsUnwritable:
            raise StartupError(
                f"The policy cannot be stored in {settings.state_dir}; make it writable, or set "
                "PACELINE_STATE_DIR to another folder."
            ) from None
        self.policy_file = PolicyFileWatcher(self.policy_store, settings.policy, reads)
        if source[1].reason is Reason.FILE:
            with contextlib.suppress(RecordsUnwritable):  # the watcher tries again
                await self.policy_file.apply(source[0])


async def _trim_heap() -> None:
    """Return the memory of large bodies; in a thread, since it takes some milliseconds."""
    await asyncio.to_thread(trim_heap)


def _listed_engines(settings: Settings) -> list[WatchedEngine]:
    return [
        WatchedEngine(entry=one, token=read_worker_key(one, os.environ) if one.api_key_env else "")
        for one in settings.workers
    ]


async def build_gateway(settings: Settings, timing: Timing = TIMING) -> Gateway:
    """Build the parts and load the stored state; raise `StartupError`."""
    check_unique_ids(settings.workers)
    async with AsyncExitStack() as stack:
        redis = None
        if settings.redis_url is not None:
            redis = RedisClient(
                settings.redis_url.get_secret_value(),
                timing.redis_deadline_s,
                timing.redis_admin_deadline_s,
            )
            stack.push_async_callback(redis.close)
        gateway = Gateway(settings, redis, timing)
        await gateway.open()
        await gateway.exit_stack.enter_async_context(stack.pop_all())
        return gateway


def _records(settings: Settings, redis: RedisClient | None) -> Records:
    folder = settings.state_dir.expanduser()
    if redis is not None:
        return RedisRecords(redis, folder)
    records = FileRecords(folder / "state.json")
    records.check()
    return records


def _traces(settings: Settings) -> Traces | None:
    """Load the exporter of spans, if it is configured."""
    if settings.traces == "off":
        return None
    try:
        from gateway.telemetry.tracing import Traces  # noqa: PLC0415  # an extra
    except ImportError:
        raise StartupError(
            "PACELINE_TRACES needs the OpenTelemetry packages; install them with "
            f"`{install_command('otel')}`."
        ) from None
    return Traces()
