"""The parts of one gateway, put together once and passed along: no globals."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from gateway.accounting import Accounting
from gateway.caller import WeekClock
from gateway.control import Control
from gateway.dispatch import Dispatch
from gateway.errors import StartRefused
from gateway.fleet import Fleet
from gateway.forward import Upstream
from gateway.keys.book import KeyBook
from gateway.keys.keeping import Keeping
from gateway.keys.keyring import Keyring
from gateway.keys.usage import Ledger
from gateway.listed import check_listed, read_keys
from gateway.metrics import Meters
from gateway.probing import Probes
from gateway.records import FileRecords, Records
from gateway.settings import Settings
from gateway.store import MemoryStore, Store
from policies.document import PolicyDocument, PolicyInvalid, load_policy, shipped_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Everything that the data plane and the admin plane share."""

    settings: Settings
    policy: PolicyDocument
    fleet: Fleet
    store: Store
    records: Records
    keyring: Keyring
    keys: KeyBook
    keeping: Keeping
    meters: Meters
    accounting: Accounting
    dispatch: Dispatch
    upstream: Upstream
    control: Control
    probes: Probes
    clock: Callable[[], float]
    """Monotonic seconds."""
    week: WeekClock
    wall: Callable[[], float]
    """The time of the day, in seconds since the epoch."""
    rng: Random
    """Breaks ties between equal workers."""


def build_line(settings: Settings, rng: Random | None = None) -> Line:
    """Put the parts together; opens nothing yet. Raise `StartRefused` for an unusable policy."""
    clock, wall = time.monotonic, time.time
    rng = rng or Random()  # noqa: S311  # spreads load, guards nothing
    policy = _policy(settings)
    check_listed(settings.workers, policy)
    keys = read_keys(settings.workers, os.environ)
    listed_models = frozenset(model for worker in settings.workers for model in worker.models)
    fleet = Fleet(clock, rng.random, listed_models)
    dispatch = Dispatch(fleet, clock, rng)
    store = MemoryStore()
    records = _records(settings)
    ledger = Ledger(life=secrets.token_hex(4))
    keyring = Keyring(settings.api_key, clock, wall, ledger.used)
    book = KeyBook(records, keyring, wall)
    meters = Meters()
    return Line(
        settings=settings,
        policy=policy,
        fleet=fleet,
        store=store,
        records=records,
        keyring=keyring,
        keys=book,
        keeping=Keeping(records, book, ledger, wall),
        meters=meters,
        accounting=Accounting(store, meters, ledger, wall),
        dispatch=dispatch,
        upstream=Upstream(settings, keys, dispatch, clock),
        control=Control(settings, fleet, store),
        probes=Probes(settings.workers, keys, fleet, dispatch, store),
        clock=clock,
        week=WeekClock(wall),
        wall=wall,
        rng=rng,
    )


def _records(settings: Settings) -> Records:
    records = FileRecords(settings.state_dir.expanduser() / "state.json")
    records.check()
    return records


def _policy(settings: Settings) -> PolicyDocument:
    try:
        return load_policy(settings.policy) if settings.policy else shipped_policy()
    except PolicyInvalid as invalid:
        raise StartRefused(str(invalid)) from None
