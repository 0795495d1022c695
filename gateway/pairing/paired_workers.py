"""Paired workers, each with a token that opens the routes of its id.

A token is derived from the join token and a random number in the record. So the records hold no
secret, each gateway of the fleet derives it for its own calls, and a new join token ends all
pairings.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from pydantic import AwareDatetime, BaseModel, ConfigDict, SecretStr

from gateway.auth.api_keys import matches_secret
from gateway.engines.paceline import PacelineWorker
from gateway.errors import (
    PairingEnded,
    RecordsUnwritable,
    TooManyWorkers,
    WorkerUnknown,
)
from gateway.fleet.registry import WorkerRegistry
from gateway.state.counters import MAX_WORKERS
from gateway.state.records import RecordReader, Records, RecordTable, as_model
from paceline.pairing import TOKEN_PREFIX, Pairing

log = logging.getLogger(__name__)

_BEARER = f"Bearer {TOKEN_PREFIX}".encode()
_KIND = "pairings"
# Records of their own: a gateway that writes one can bring back no pairing that another has ended.
_SEEN = "/seen"
_SEEN_INTERVAL = timedelta(hours=1)
_FLEET = "/fleet"
_NAME_CHARS = 58
"""Of the id that a worker would like: a number may follow."""


class PairedWorker(BaseModel):
    """The pairing of one worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    since: AwareDatetime
    address: str
    """At which it paired."""
    number: str
    """The secret that its token is derived from."""


class _Seen(BaseModel):
    at: AwareDatetime


class PairedWorkers:
    """All paired workers; `wall` returns seconds since 1970, `secret` is the join token."""

    def __init__(
        self,
        records: Records,
        secret: bytes,
        fleet: WorkerRegistry,
        backend: PacelineWorker,
        wall: Callable[[], float],
    ) -> None:
        self._table = RecordTable(records, _KIND, self._apply)
        self._reader = RecordReader(records, _KIND, as_model(PairedWorker))
        self._seen_reader = RecordReader(records, _KIND, as_model(_Seen))
        self._secret = secret
        self._fleet = fleet
        self._backend = backend
        self._wall = wall
        self._fleet_id = ""
        self.by_worker: Mapping[str, PairedWorker] = {}
        self.seen: Mapping[str, datetime] = {}
        """The last sign of each, an hour old at most while it lives."""

    async def refresh(self) -> None:
        """Read the stored pairings, and apply the changes of other gateways."""
        await self._table.refresh()

    async def add(self, name: str, address: str) -> Pairing:
        """Pair a worker: under this id, or one like it while a live worker has this one."""
        await self.refresh()
        if len(self.by_worker) >= MAX_WORKERS:
            raise TooManyWorkers
        worker_id, number = name, 1
        while self._fleet.get(worker_id) is not None:
            number += 1
            worker_id = f"{name[:_NAME_CHARS]}-{number}"
        paired = PairedWorker(since=self._now(), address=address, number=secrets.token_hex(16))
        await self._table.replace(worker_id, paired.model_dump_json())
        log.info("worker.paired worker=%s address=%s", worker_id, address)
        return Pairing(
            worker_id=worker_id,
            token=self._token(worker_id, paired),
            nodes_key=hmac.digest(self._secret, b"paceline prefix nodes", "sha256").hex(),
        )

    async def remove(self, worker_id: str, author: str) -> None:
        """End the pairing of a worker, which leaves the fleet; raise `WorkerUnknown`."""
        await self.refresh()
        if worker_id not in self.by_worker:
            raise WorkerUnknown
        await self._table.remove(worker_id)
        await self._table.remove(worker_id + _SEEN)
        log.info("worker.unpaired worker=%s author=%r", worker_id, author)

    def authenticates(self, worker_id: str, authorization: bytes | None) -> bool:
        """Return whether this is the token of the worker; raise `PairingEnded` if of none now."""
        if not (authorization or b"").startswith(_BEARER):
            return False
        if not matches_secret(authorization, self._backend.paired.get(worker_id)):
            raise PairingEnded
        return True

    async def record_sign(self, worker_id: str) -> None:
        """Record that a paired worker lives, once an hour; without a store, an hour later."""
        last, now = self.seen.get(worker_id), self._now()
        if worker_id in self.by_worker and (last is None or now - last > _SEEN_INTERVAL):
            self.seen = {**self.seen, worker_id: now}  # no further heartbeat waits for the store
            with contextlib.suppress(RecordsUnwritable):
                await self._table.replace(worker_id + _SEEN, _Seen(at=now).model_dump_json())

    async def fleet_id(self) -> str:
        """Return the id of the fleet, a random number that its first gateway has stored."""
        with contextlib.suppress(RecordsUnwritable):
            await self._table.add(_FLEET, json.dumps({"id": secrets.token_hex(8)}))
        return self._fleet_id

    async def _apply(self, texts: Mapping[str, str]) -> None:
        """Replace the tokens of the data plane; workers whose pairing has ended leave the fleet."""
        workers = {name: text for name, text in texts.items() if "/" not in name}
        seen = {name: text for name, text in texts.items() if name.endswith(_SEEN)}
        before, self.by_worker = self.by_worker, self._reader.read(workers)
        self.seen = {
            name.removesuffix(_SEEN): one.at for name, one in self._seen_reader.read(seen).items()
        }
        self._fleet_id = str(json.loads(texts.get(_FLEET, "{}")).get("id", ""))
        self._backend.paired = {
            name: SecretStr(self._token(name, one)) for name, one in self.by_worker.items()
        }
        for name in before.keys() - self.by_worker.keys():
            self._fleet.remove(name)

    def _token(self, worker_id: str, paired: PairedWorker) -> str:
        text = f"paceline paired worker {worker_id} {paired.number}".encode()
        return TOKEN_PREFIX + urlsafe_b64encode(hmac.digest(self._secret, text, "sha256")).decode()

    def _now(self) -> datetime:
        return datetime.fromtimestamp(int(self._wall()), UTC)
