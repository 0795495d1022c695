"""The parts of one gateway, put together once and passed along: no globals."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from gateway.accounting import Accounting
from gateway.control import Control
from gateway.errors import StartRefused
from gateway.fleet import Fleet
from gateway.forward import Upstream
from gateway.metrics import Meters
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
    meters: Meters
    accounting: Accounting
    upstream: Upstream
    control: Control
    clock: Callable[[], float]
    """Monotonic seconds."""
    rng: Random
    """Breaks ties between equal workers."""


def build_line(settings: Settings, rng: Random | None = None) -> Line:
    """Put the parts together; opens nothing yet. Raise `StartRefused` for an unusable policy."""
    clock = time.monotonic
    fleet = Fleet(clock)
    store = MemoryStore()
    meters = Meters()
    return Line(
        settings=settings,
        policy=_policy(settings),
        fleet=fleet,
        store=store,
        meters=meters,
        accounting=Accounting(store, meters),
        upstream=Upstream(settings, fleet, clock),
        control=Control(settings, fleet, store),
        clock=clock,
        rng=rng or Random(),  # noqa: S311  # spreads load, guards nothing
    )


def _policy(settings: Settings) -> PolicyDocument:
    try:
        return load_policy(settings.policy) if settings.policy else shipped_policy()
    except PolicyInvalid as invalid:
        raise StartRefused(str(invalid)) from None
