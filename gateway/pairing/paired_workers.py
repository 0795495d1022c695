"""Paired workers, each with a token that opens the routes of its id.

A token is derived from the join token and a random number in the record. So the records hold no
secret, each gateway of the fleet derives it for its own calls, and a new join token ends all
pairings. So is the key of the authority that signs the certificates of workers and gateways. The
name in the certificate of a worker stands for its id and this pairing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import ssl
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NotRequired

from pydantic import AwareDatetime, BaseModel, ConfigDict, SecretStr
from typing_extensions import TypedDict

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
from paceline.pairing import CERTIFICATE_LIFE_S, TOKEN_PREFIX, Pairing, PublicKey, is_due
from paceline.protocol import WorkerReport

if TYPE_CHECKING:
    from paceline.certificates import Authority

log = logging.getLogger(__name__)

_BEARER = f"Bearer {TOKEN_PREFIX}".encode()
_KIND = "pairings"
# Records of their own: a gateway that writes one can bring back no pairing that another has ended.
_SEEN, _KEY, _ENDED = "/seen", "/key", "/ended"
_SEEN_INTERVAL = timedelta(hours=1)
_AUTHORITY = "/authority"
_GATEWAY = "gateway"
"""The name in the certificates of gateways."""
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


class _At(BaseModel):
    at: AwareDatetime


class _Key(BaseModel):
    public_key: PublicKey


class Certificates(TypedDict):
    """The certificates in the answer to a heartbeat of a paired worker."""

    certificate: NotRequired[str]
    """A new one in PEM, before that of the worker expires."""
    authority: NotRequired[str]
    """The certificate of the authority that has signed it."""
    ended_pairings: NotRequired[list[str]]
    """Names in certificates that no worker may admit any more."""


class PairedWorkers:
    """All paired workers; `wall` returns seconds since 1970, `secret` is the join token.

    `tls`, for connections to them, gets the certificate of this gateway.
    """

    def __init__(
        self,
        records: Records,
        secret: bytes,
        fleet: WorkerRegistry,
        backend: PacelineWorker,
        wall: Callable[[], float],
        *,
        tls: ssl.SSLContext,
    ) -> None:
        self._table = RecordTable(records, _KIND, self._apply)
        self._reader = RecordReader(records, _KIND, as_model(PairedWorker))
        self._at_reader = RecordReader(records, _KIND, as_model(_At))
        self._key_reader = RecordReader(records, _KIND, as_model(_Key))
        self._secret = secret
        self._fleet = fleet
        self._backend = backend
        self._wall = wall
        self._tls = tls
        self._tls_until_s = 0.0
        self._authority: Authority | None = None
        self._keys: Mapping[str, str] = {}
        """The public keys of workers; one that an older version has paired has none yet."""
        self._ended: Mapping[str, datetime] = {}
        """The names in certificates of ended pairings, and when the last of them expires."""
        self.by_worker: Mapping[str, PairedWorker] = {}
        self.seen: Mapping[str, datetime] = {}
        """The last sign of each, an hour old at most while it lives."""

    async def refresh(self) -> None:
        """Read the stored pairings, apply the changes of other gateways, and renew certificates."""
        await self._table.refresh()
        await self._renew_own()

    async def add(self, name: str, address: str, public_key: str = "") -> Pairing:
        """Pair a worker: under this id, or one like it while a live worker has this one."""
        await self.refresh()
        if len(self.by_worker) >= MAX_WORKERS:
            raise TooManyWorkers
        worker_id, number = name, 1
        while self._fleet.get(worker_id) is not None:
            number += 1
            worker_id = f"{name[:_NAME_CHARS]}-{number}"
        await self._end_certificates(worker_id)
        await self._table.remove(worker_id + _KEY)
        paired = PairedWorker(since=self._now(), address=address, number=secrets.token_hex(16))
        await self._table.replace(worker_id, paired.model_dump_json())
        certificate = authority = ""
        if public_key:
            certificate, authority = await self._certify(worker_id, public_key)
        log.info("worker.paired worker=%s address=%s", worker_id, address)
        return Pairing(
            worker_id=worker_id,
            token=self._token(worker_id, paired),
            nodes_key=hmac.digest(self._secret, b"paceline prefix nodes", "sha256").hex(),
            certificate=certificate,
            authority=authority,
        )

    async def remove(self, worker_id: str, author: str) -> None:
        """End the pairing of a worker, which leaves the fleet; raise `WorkerUnknown`."""
        await self.refresh()
        if worker_id not in self.by_worker:
            raise WorkerUnknown
        await self._end_certificates(worker_id)
        for record in (worker_id, worker_id + _SEEN, worker_id + _KEY):
            await self._table.remove(record)
        log.info("worker.unpaired worker=%s author=%r", worker_id, author)

    def authenticates(self, worker_id: str, authorization: bytes | None) -> bool:
        """Return whether this is the token of the worker; raise `PairingEnded` if of none now."""
        if not (authorization or b"").startswith(_BEARER):
            return False
        if not matches_secret(authorization, self._backend.paired.get(worker_id)):
            raise PairingEnded
        return True

    async def certificates(self, report: WorkerReport) -> Certificates:
        """Return the ended pairings, and a certificate for a worker whose own one expires soon.

        A worker that was paired by an older version has the key of its first report with one.
        """
        worker_id, key = report.worker_id, report.public_key
        if worker_id not in self.by_worker or not key:
            return {}
        answer: Certificates = {"ended_pairings": [*self._ended]}
        due = is_due(report.certificate_until_s, self._wall())
        if due and self._keys.get(worker_id, key) == key:
            with contextlib.suppress(RecordsUnwritable):  # with one of the next heartbeats
                certificate, authority = await self._certify(worker_id, key)
                answer |= {"certificate": certificate, "authority": authority}
        return answer

    async def fingerprint(self) -> str:
        """Return the fingerprint of the fleet's authority; '' if it could not be stored."""
        with contextlib.suppress(RecordsUnwritable):
            await self._add_authority()
        return self._authority.fingerprint if self._authority else ""

    async def record_sign(self, worker_id: str) -> None:
        """Record that a paired worker lives, once an hour; without a store, an hour later."""
        last, now = self.seen.get(worker_id), self._now()
        if worker_id in self.by_worker and (last is None or now - last > _SEEN_INTERVAL):
            self.seen = {**self.seen, worker_id: now}  # no further heartbeat waits for the store
            with contextlib.suppress(RecordsUnwritable):
                await self._table.replace(worker_id + _SEEN, _At(at=now).model_dump_json())

    async def _apply(self, texts: Mapping[str, str]) -> None:
        """Replace the tokens of the data plane; workers whose pairing has ended leave the fleet."""
        workers = {name: text for name, text in texts.items() if "/" not in name}
        times = {name: text for name, text in texts.items() if name.endswith((_SEEN, _ENDED))}
        before, self.by_worker = self.by_worker, self._reader.read(workers)
        at = {name: one.at for name, one in self._at_reader.read(times).items()}
        self.seen = {n.removesuffix(_SEEN): at[n] for n in at if n.endswith(_SEEN)}
        self._ended = {n.removesuffix(_ENDED): at[n] for n in at if n.endswith(_ENDED)}
        keys = self._key_reader.read({n: t for n, t in texts.items() if n.endswith(_KEY)})
        self._keys = {name.removesuffix(_KEY): one.public_key for name, one in keys.items()}
        if self._authority is None and (record := texts.get(_AUTHORITY)):
            self._authority = await asyncio.to_thread(self._derive, json.loads(record)["number"])
        await self._renew_own()
        self._backend.server_names = {name: self._server_name(name) for name in self.by_worker}
        self._backend.paired = {
            name: SecretStr(self._token(name, one)) for name, one in self.by_worker.items()
        }
        for name in before.keys() - self.by_worker.keys():
            self._fleet.remove(name)

    def _token(self, worker_id: str, paired: PairedWorker) -> str:
        text = f"paceline paired worker {worker_id} {paired.number}".encode()
        return TOKEN_PREFIX + urlsafe_b64encode(hmac.digest(self._secret, text, "sha256")).decode()

    def _server_name(self, worker_id: str) -> str:
        """Return the name in the certificate of a worker; '' if it was paired without a key."""
        if worker_id not in self._keys or worker_id not in self.by_worker:
            return ""
        text = f"paceline worker name {worker_id} {self.by_worker[worker_id].number}".encode()
        return hmac.digest(self._secret, text, "sha256")[:16].hex() + ".worker"

    def _derive(self, number: str) -> Authority:
        from paceline.certificates import Authority  # noqa: PLC0415  # slow, and not for others

        text = f"paceline authority {number}".encode()
        return Authority(hmac.digest(self._secret, text, "sha256"))

    async def _add_authority(self) -> Authority:
        """Return the authority of the fleet, whose number its first gateway has stored."""
        if self._authority is None:
            await self._table.add(_AUTHORITY, json.dumps({"number": secrets.token_hex(16)}))
        if self._authority is None:
            raise RecordsUnwritable
        return self._authority

    async def _certify(self, worker_id: str, public_key: str) -> tuple[str, str]:
        """Return a certificate for a worker, whose key is stored, and that of the authority."""
        authority = await self._add_authority()
        if worker_id not in self._keys:
            key = _Key(public_key=public_key)
            await self._table.replace(worker_id + _KEY, key.model_dump_json())
        given = public_key, self._server_name(worker_id), self._wall()
        log.info("worker.certified worker=%s", worker_id)
        return await asyncio.to_thread(authority.issue, *given), authority.certificate

    async def _end_certificates(self, worker_id: str) -> None:
        """Let no worker admit the certificates of a pairing, and forget those that have expired."""
        for name, until in self._ended.items():
            if until < self._now():
                await self._table.remove(name + _ENDED)
        if name := self._server_name(worker_id):
            until = self._now() + timedelta(seconds=CERTIFICATE_LIFE_S)
            await self._table.replace(name + _ENDED, _At(at=until).model_dump_json())

    async def _renew_own(self) -> None:
        """Give this gateway a new key and certificate, only in memory, if it needs one."""
        if self._keys and self._authority is not None and is_due(self._tls_until_s, self._wall()):
            given = _GATEWAY, self._wall()
            identity = await asyncio.to_thread(self._authority.new_identity, *given)
            identity.load(self._tls)
            self._tls_until_s = identity.until_s

    def _now(self) -> datetime:
        return datetime.fromtimestamp(int(self._wall()), UTC)
