"""The parts of one gateway, put together once and passed along: no globals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from gateway.auth.api_keys import ApiKeys, missing_pools
from gateway.auth.key_store import KeyStore
from gateway.auth.usage import UsageLedger
from gateway.auth.usage_store import USAGE_KIND, UsageStore
from gateway.cluster.counters import SharedCounters
from gateway.cluster.prefix_claims import SharedPrefixClaims
from gateway.cluster.rate_limits import SharedRateLimits
from gateway.cluster.records import RedisRecords
from gateway.cluster.redis import RedisClient
from gateway.cluster.sync import ClusterSync, PeerWorkers, SharedState
from gateway.cluster.worker_reports import SharedWorkerReports
from gateway.config.policy_file import PolicyWatch, read_source
from gateway.config.policy_store import PolicyStore, open_policy_store
from gateway.config.policy_versions import problems_text
from gateway.config.settings import Settings
from gateway.config.startup_checks import check_binding
from gateway.config.static_workers import check_listed, read_keys
from gateway.errors import RecordsUnwritable, StartupError
from gateway.fleet.cordons import Cordons
from gateway.fleet.health import HealthChecker, ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.scheduler import Scheduler
from gateway.periodic import WeekClock
from gateway.routing.prefix_affinity import PrefixHasher, PrefixIndex
from gateway.routing.replay import RecentRequests
from gateway.storage.counters import CounterStore, MemoryCounters
from gateway.storage.records import FileRecords, Records
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.stats import SnapshotHistory
from policies.document import PolicyDocument, PolicyInvalid, Problem

if TYPE_CHECKING:
    from gateway.telemetry.tracing import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything that the data plane and the admin plane share."""

    settings: Settings
    policy_store: PolicyStore
    policy_file: PolicyWatch
    recent_requests: RecentRequests
    fleet: WorkerRegistry
    cordons: Cordons
    counters: CounterStore
    records: Records
    api_keys: ApiKeys
    key_store: KeyStore
    usage_store: UsageStore
    access_log: AbstractAsyncContextManager[object]
    """What is written of each request, where it is."""
    traces: Traces | None
    """Where spans go, where they are asked for."""
    accounting: Accounting
    stats_history: SnapshotHistory
    scheduler: Scheduler
    prefix_names: PrefixHasher
    prefix_index: PrefixIndex
    worker_keys: Mapping[str, str]
    """The secrets of listed workers, by the id of the worker."""
    control: ReportClient
    cluster_sync: ClusterSync
    redis: RedisClient | None
    """The one connection to Redis, where there is one."""
    probes: HealthChecker
    clock: Callable[[], float]
    """Monotonic seconds."""
    week_clock: WeekClock
    wall: Callable[[], float]
    """The time of the day, in seconds since the epoch."""
    rng: Random
    """Breaks ties between equal workers."""


async def build_gateway(settings: Settings, rng: Random | None = None) -> Gateway:
    """Put the parts together and read what is kept. Raise `StartupError`."""
    check_listed(settings.workers)
    link = (
        None if settings.redis_url is None else RedisClient(settings.redis_url.get_secret_value())
    )
    try:
        return await _build(settings, rng or Random(), link)  # noqa: S311  # spreads load alone
    except BaseException:
        if link is not None:
            await link.close()
        raise


async def _build(settings: Settings, rng: Random, link: RedisClient | None) -> Gateway:
    clock, wall = time.monotonic, time.time
    records = _records(settings, link)
    listed_keys = read_keys(settings.workers, os.environ)
    listed_models = frozenset(model for worker in settings.workers for model in worker.models)
    fleet = WorkerRegistry(clock, rng.random, listed_models)
    prefixes = PrefixIndex(clock)
    dispatch = Scheduler(fleet, prefixes, clock, rng)
    # Gateways that share the token give one system prompt one name.
    token = settings.join_token
    secret = token.get_secret_value().encode() if token else secrets.token_bytes(32)
    ledger = UsageLedger(life=secrets.token_hex(4))
    keyring = ApiKeys(settings.api_key, clock, wall, ledger.tokens_used)
    keys = KeyStore(records, keyring, wall)
    access_log = AccessLog(settings.access_log) if settings.access_log else None
    accounting = Accounting(ledger, access_log, wall)
    shared = None if link is None else _shared(link, keyring, prefixes, accounting, clock)
    store: CounterStore = shared.store if shared else MemoryCounters(accounting.take_pending)
    control = ReportClient(settings, fleet, store)
    neighbours = shared and PeerWorkers(
        shared.boots, fleet, dispatch, control, prefixes, clock=clock
    )
    cordons = Cordons(records, fleet, dispatch, control, wall)
    await open_kept(records, ledger, keys, cordons, wall)
    check_binding(settings, keyed=keyring.required)
    traces = _traces(settings)
    # Last of all that may refuse the start: it writes the first version.
    book = await _book(settings, records, keyring, wall)
    return Gateway(
        settings=settings,
        policy_store=book,
        policy_file=PolicyWatch(book, settings.policy),
        recent_requests=RecentRequests(),
        fleet=fleet,
        cordons=cordons,
        counters=store,
        records=records,
        api_keys=keyring,
        key_store=keys,
        usage_store=UsageStore(
            records, ledger, wall, (keys.refresh, cordons.refresh, book.refresh)
        ),
        access_log=access_log or contextlib.nullcontext(),
        traces=traces,
        accounting=accounting,
        stats_history=SnapshotHistory(accounting.lane_totals, clock),
        scheduler=dispatch,
        prefix_names=PrefixHasher(secret),
        prefix_index=prefixes,
        worker_keys=listed_keys,
        control=control,
        redis=link,
        cluster_sync=ClusterSync(shared, neighbours),
        probes=HealthChecker(settings.workers, listed_keys, fleet, dispatch, store),
        clock=clock,
        week_clock=WeekClock(wall),
        wall=wall,
        rng=rng,
    )


def _records(settings: Settings, link: RedisClient | None) -> Records:
    folder = settings.state_dir.expanduser()
    if link is not None:
        return RedisRecords(link, folder)
    records = FileRecords(folder / "state.json")
    records.check()
    return records


def _traces(settings: Settings) -> Traces | None:
    """Load what sends spans, for those who ask for them alone."""
    if settings.traces == "off":
        return None
    try:
        from gateway.telemetry.tracing import Traces  # noqa: PLC0415  # an extra
    except ImportError:
        raise StartupError(
            "PACELINE_TRACES needs what is not installed; `pip install -e '.[otel]'` brings it, in "
            "the folder of Paceline."
        ) from None
    return Traces()


def _shared(
    link: RedisClient,
    keyring: ApiKeys,
    prefixes: PrefixIndex,
    accounting: Accounting,
    clock: Callable[[], float],
) -> SharedState:
    boots = SharedWorkerReports(link)
    store = SharedCounters(link, boots, accounting.take_pending)
    limits = SharedRateLimits(link, keyring.rate_limiters, clock)
    return SharedState(link, store, boots, limits, SharedPrefixClaims(link, prefixes))


async def _book(
    settings: Settings, records: Records, keyring: ApiKeys, wall: Callable[[], float]
) -> PolicyStore:
    def warnings(policy: PolicyDocument) -> list[Problem]:
        return missing_pools(keyring.records.values(), policy, wall())

    source = await asyncio.to_thread(read_source, settings.policy)
    try:
        return await open_policy_store(records, settings.workers, source, wall, warnings)
    except PolicyInvalid as invalid:
        raise StartupError(
            f"The policy that would be in force is not usable: {problems_text(invalid)}. Mend "
            "that, or name another file with PACELINE_POLICY."
        ) from None
    except ValueError:
        raise StartupError(
            f"The versions of the policy in {settings.state_dir} are damaged; mend them, or move "
            "them away to begin anew."
        ) from None
    except RecordsUnwritable:
        raise StartupError(
            f"The policy cannot be kept in {settings.state_dir}; make it writable, or name another "
            "folder with PACELINE_STATE_DIR."
        ) from None


async def open_kept(
    records: Records,
    ledger: UsageLedger,
    keys: KeyStore,
    cordons: Cordons,
    wall: Callable[[], float],
) -> None:
    """Read what is kept, before the first request; raise `StartupError`."""
    try:
        ledger.load_today(await records.all(USAGE_KIND), wall())
        await keys.open()
        await cordons.open()
    except RecordsUnwritable:
        raise StartupError("What is kept of keys and their usage cannot be read.") from None
