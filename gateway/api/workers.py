"""`/admin/v1/workers`: workers join by heartbeat and leave; admins list, cordon and drain them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal, NotRequired
from urllib.parse import urlsplit

from fastapi import Query, Request
from typing_extensions import TypedDict

from gateway.api.auth import Author, CurrentGateway, CurrentProxy, admin_router, worker_router
from gateway.api.openapi import FOR_ADMINS, STORED, WITH_BODY, failures
from gateway.assembly import Gateway
from gateway.config.startup_checks import local_url, network_url, secret_file
from gateway.errors import (
    CacheNotCleared,
    FieldInvalid,
    KeyRefused,
    TooManyWorkers,
    WorkerIdTaken,
    WorkerUnconfirmed,
    WorkerUnknown,
)
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S, speaks_tls
from gateway.fleet.worker import WorkerState
from gateway.pairing.paired_workers import Certificates
from gateway.state.counters import GONE_WORKERS
from gateway.status.render import worker_state
from paceline.addresses import is_loopback
from paceline.protocol import EARLIER_BOOTS, PROTOCOL, WorkerReport, speaks

PREFIX = "/admin/v1/workers"
heartbeats = worker_router(PREFIX)
router = admin_router(PREFIX)
_HEARTBEAT = failures(KeyRefused, *WITH_BODY, WorkerIdTaken, WorkerUnconfirmed, TooManyWorkers)
_CHANGE = failures(*FOR_ADMINS, *STORED, WorkerUnknown, FieldInvalid)


class Interval(Certificates):
    """The interval of heartbeats that the gateway expects, and certificates for the worker."""

    interval_s: float


class SpokenProtocol(TypedDict):
    """The protocol between workers and this gateway, which understands one step more and less."""

    protocol: int


class JoinedWorker(TypedDict):
    """A worker that has joined."""

    worker_id: str
    url: str
    cordoned_by: str
    """The admin who keeps new requests from it; empty if none does."""


class LaneLoad(TypedDict):
    """The load of one lane."""

    name: str
    slots: int
    running: int
    waiting: int
    in_flight: int
    """Requests of this gateway."""


class WorkerDetails(TypedDict):
    """The state of one worker; a missing worker lacks lanes, and after a day its URL."""

    worker_id: str
    state: str
    in_flight: int
    lanes: list[LaneLoad]
    url: NotRequired[str]
    tls: NotRequired[bool]
    """Whether the gateways call it over TLS, as they do paired workers."""
    kind: NotRequired[str]
    """`paceline`, or the kind of another engine."""
    model: NotRequired[str]
    models: NotRequired[list[str]]
    labels: NotRequired[list[str]]
    heartbeat_age_s: NotRequired[float]
    problem: NotRequired[str]
    """Why the gateway cannot reach the worker, or that another one asks for its id."""
    gone_since: NotRequired[str]
    gone_because: NotRequired[Literal["restarting", "silent", "left"]]
    """As `absence` in `/v1/status`."""
    cordoned_since: NotRequired[str]
    cordoned_by: NotRequired[str]
    paired_since: NotRequired[str]
    """It has a token of its own."""
    last_seen: NotRequired[str]
    """Of a paired worker: its last sign, to the hour."""


class Joining(TypedDict):
    """The values in the commands that join a Mac."""

    url: str
    """The address of the gateway for other machines; empty if it listens for this one only."""
    local_url: str
    token_file: str
    """The file of the join token, unless the settings name the token."""


class Workers(TypedDict):
    """All workers that have joined, were lost within a day, are cordoned, or are paired."""

    workers: list[WorkerDetails]
    joining: Joining


class DrainedWorker(WorkerDetails):
    """The state of a worker after a drain."""

    drained: bool
    """Its last request has ended."""
    moved: int
    """Streams of this gateway that went on at other workers."""


@heartbeats.put("/{worker_id}", responses=_HEARTBEAT)
async def heartbeat(worker_id: str, report: WorkerReport, gateway: CurrentGateway) -> Interval:
    """Record a heartbeat; a ready worker joins once it answers at its URL."""
    if urlsplit(report.url).path:
        raise FieldInvalid("'url' must be like http://192.168.1.20:9200.", param="url")
    if report.worker_id != worker_id:
        raise FieldInvalid("The path names another worker than the report.", param="worker_id")
    if report.boot_id.startswith(EARLIER_BOOTS):
        raise FieldInvalid("'boot_id' is a reserved name.", param="boot_id")
    if worker_id == GONE_WORKERS:
        raise FieldInvalid("'worker_id' is a reserved name.", param="worker_id")
    if not speaks(report.protocol):
        raise FieldInvalid(
            f"The worker speaks protocol {report.protocol} and this gateway {PROTOCOL}; they may "
            "differ by one. Update the older of the two.",
            param="protocol",
        )
    try:
        reached = gateway.fleet.needs_call_back(report)
    except WorkerIdTaken:
        gateway.fleet.record_rival(worker_id, report.url)
        raise
    if reached and (problem := await gateway.control.call_back(report)):
        gateway.fleet.record_unreachable(report, problem)
        raise WorkerUnconfirmed(problem)
    gateway.fleet.heartbeat(report, reached=reached)
    gateway.prefix_index.record_report(report)
    await gateway.counters.store_report(report)
    await gateway.paired_workers.record_sign(worker_id)
    return {
        "interval_s": HEARTBEAT_INTERVAL_S,
        **await gateway.paired_workers.certificates(report),
    }


@heartbeats.get("/{worker_id}/protocol", responses=failures(KeyRefused, WorkerIdTaken))
async def show_protocol(
    worker_id: str,
    gateway: CurrentGateway,
    url: Annotated[str, Query(max_length=2048, description="The address of the worker.")] = "",
) -> SpokenProtocol:
    """Show the protocol for workers; a worker asks for it before it loads its model.

    With its address, a worker learns whether its id is free.
    """
    if url:
        gateway.fleet.check_id(worker_id, url)
    return {"protocol": PROTOCOL}


@heartbeats.delete("/{worker_id}", status_code=204, responses=failures(KeyRefused, FieldInvalid))
async def leave(
    worker_id: str,
    gateway: CurrentGateway,
    restarting: Annotated[
        bool, Query(description="Its process has ended, and its supervisor restarts it.")
    ] = False,
) -> None:
    """Remove a worker."""
    gateway.fleet.remove(worker_id, restarting=restarting)


@heartbeats.get("/{worker_id}/joined", responses=failures(KeyRefused, WorkerUnknown))
async def show_joined(worker_id: str, gateway: CurrentGateway) -> JoinedWorker:
    """Confirm that a worker has joined and is ready, to the process that started it."""
    member = gateway.fleet.get(worker_id)
    if member is None or member.problem or not member.report.ready:
        raise WorkerUnknown
    cordon = gateway.cordons.by_worker.get(worker_id)
    by = cordon.author if cordon else ""
    return {"worker_id": worker_id, "url": member.report.url, "cordoned_by": by}


@router.get("", responses=failures(*FOR_ADMINS))
async def show_all(gateway: CurrentGateway, request: Request) -> Workers:
    """Show the workers."""
    members = {member.report.worker_id: member for member in gateway.fleet.workers()}
    known = gateway.fleet.absences(), gateway.cordons.by_worker, gateway.paired_workers.by_worker
    names = dict.fromkeys((*members, *(name for part in known for name in part)))
    host, port = gateway.settings.host, gateway.settings.port or request.url.port or 0
    joining: Joining = {
        "url": "" if is_loopback(host) else network_url(host, port),
        "local_url": local_url(host, port),
        "token_file": str(secret_file(gateway.settings, "join_token").absolute()),
    }
    workers = [_worker(gateway, name, members.get(name)) for name in names]
    return {"workers": workers, "joining": joining}


@router.put("/{worker_id}/cordon", responses=_CHANGE)
async def cordon(worker_id: str, author: Author, gateway: CurrentGateway) -> WorkerDetails:
    """Cordon a worker: it gets no new requests."""
    await gateway.cordons.add(worker_id, author)
    return _worker(gateway, worker_id, gateway.fleet.get(worker_id))


@router.delete("/{worker_id}/cordon", status_code=204, responses=_CHANGE)
async def uncordon(worker_id: str, author: Author, gateway: CurrentGateway) -> None:
    """Lift the cordon of a worker."""
    await gateway.cordons.remove(worker_id, author)


@router.delete(
    "/{worker_id}/prefix-cache",
    status_code=204,
    responses=failures(*FOR_ADMINS, WorkerUnknown, CacheNotCleared),
)
async def clear_prefix_cache(worker_id: str, gateway: CurrentGateway) -> None:
    """Empty the prefix cache of a worker, in memory and on disk."""
    await gateway.prefix_deletion.clear(worker_id)


@router.post("/{worker_id}/drain", responses=_CHANGE)
async def drain(
    worker_id: str,
    author: Author,
    *,
    gateway: CurrentGateway,
    proxy: CurrentProxy,
    timeout_s: Annotated[int, Query(ge=0, le=600, description="The longest wait.")] = 30,
    move: Annotated[
        bool, Query(description="Continue this gateway's streams at other workers.")
    ] = False,
) -> DrainedWorker:
    """Cordon a worker and wait for its requests to end."""
    await gateway.cordons.add(worker_id, author)
    moved = proxy.forwarder.move_streams(worker_id) if move else 0
    drained = await gateway.cordons.drained(worker_id, timeout_s)
    worker = _worker(gateway, worker_id, gateway.fleet.get(worker_id))
    return {"drained": drained, "moved": moved, **worker}


def _worker(gateway: Gateway, worker_id: str, member: WorkerState | None) -> WorkerDetails:
    worker: WorkerDetails = {
        "worker_id": worker_id,
        "state": worker_state(member),
        "in_flight": member.in_flight.total() if member else 0,
        "lanes": [],
    }
    gone = gateway.fleet.absences().get(worker_id)
    if last := member or gone:
        report = last.report
        worker |= {"url": report.url, "model": report.model, "labels": list(report.labels)}
        worker["tls"] = speaks_tls(report)
    if gone is not None:
        unix_s = int(gateway.wall() - gateway.clock() + gone.since_s)
        worker["gone_since"] = datetime.fromtimestamp(unix_s, UTC).isoformat()
        worker["gone_because"] = gone.kind
    if member is not None:
        worker |= {
            "kind": member.backend.kind,
            "models": list(member.models),
            "lanes": [
                {
                    "name": lane.name,
                    "slots": lane.slots,
                    "running": lane.running,
                    "waiting": lane.waiting,
                    "in_flight": member.in_flight[lane.name],
                }
                for lane in member.report.lanes
            ],
            "heartbeat_age_s": round(member.heartbeat_age_s, 3),
        }
        if member.trouble:
            worker["problem"] = member.trouble
    cordon = gateway.cordons.by_worker.get(worker_id)
    if cordon is not None:
        worker |= {"cordoned_since": cordon.since.isoformat(), "cordoned_by": cordon.author}
    if (paired := gateway.paired_workers.by_worker.get(worker_id)) is not None:
        worker["paired_since"] = paired.since.isoformat()
        if (seen := gateway.paired_workers.seen.get(worker_id)) is not None:
            worker["last_seen"] = seen.isoformat()
    return worker
