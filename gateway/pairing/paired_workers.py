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
from typing import NotRequired

from pydantic import AwareDatetime, BaseModel, ConfigDict, SecretStr
from typing_extensions import TypedDict

from gateway.auth.api_keys import matches_secret
from gateway.engines.paceline import Access, PacelineWorker
from gateway.errors import (
    PairingEnded,
    RecordsUnwritable,
    TooManyWorkers,
    WorkerUnknown,
)
from gateway.fleet.registry import WorkerRegistry
from gateway.state.counters import MAX_WORKERS
from gateway.state.records import RecordReader, Records, RecordTable, as_model
from paceline.certificates import LIFE_S, RENEWED_S, Authority, Identity
from paceline.pairing import TOKEN_PREFIX, Pairing, PublicKey
from paceline.protocol import WorkerReport

log = logging.getLogger(__name__)

_BEARER = f"Bearer {TOKEN_PREFIX}".encode()
_KIND = "pairings"
# Records of their own: a gateway that writes one can bring back no pairing that another has ended.
_SEEN, _KEY, _ENDED = "/seen", "/key", "/ended/"
_SEEN_INTERVAL = timedelta(hours=1)
_FLEET, _AUTHORITY = "/fleet", "/authority"
_GATEWAY = "gateway"
"""The name in the certificates of gateways."""
_MAX_ENDED = 1000
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

    `tls` is for connections to paired workers: it gets the certificate of this gateway.
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
        self._fleet_id = self._authority_number = ""
        self._authority: Authority | None = None
        self._keys: Mapping[str, _Key] = {}
        self._ended: Mapping[str, _At] = {}
        """The certificate names of ended pairings, until all their certificates have expired."""
        self.by_worker: Mapping[str, PairedWorker] = {}
        self.seen: Mapping[str, datetime] = {}
        """The last sign of each, an hour old at most while it lives."""

    async def refresh(self) -> None:
        """Read the stored pairings, apply the changes of other gateways, and renew certificates."""
        await self._table.refresh()
        await self._renew_own()

    async def add(self, name: str, address: str, public_key: str = "") -> Pairing:
        """Pair a worker: under this id, or one like it while a live worker has this one.

        With a public key it gets a certificate too.
        """
        await self.refresh()
        if len(self.by_worker) >= MAX_WORKERS:
            raise TooManyWorkers
        worker_id, number = name, 1
        while self._fleet.get(worker_id) is not None:
            number += 1
            worker_id = f"{name[:_NAME_CHARS]}-{number}"
        await self._end_certificates(worker_id)
        paired = PairedWorker(since=self._now(), address=address, number=secrets.token_hex(16))
        await self._table.replace(worker_id, paired.model_dump_json())
        certified: Certificates = {}
        if public_key:
            certified = await self._certify(worker_id, public_key)
        log.info("worker.paired worker=%s address=%s", worker_id, address)
        return Pairing(
            worker_id=worker_id,
            token=self._token(worker_id, paired),
            nodes_key=hmac.digest(self._secret, b"paceline prefix nodes", "sha256").hex(),
            certificate=certified.get("certificate", ""),
            authority=certified.get("authority", ""),
        )

    async def remove(self, worker_id: str, author: str) -> None:
        """End the pairing of a worker, which leaves the fleet; raise `WorkerUnknown`."""
        await self.refresh()
        if worker_id not in self.by_worker:
            raise WorkerUnknown
        await self._end_certificates(worker_id)
        await self._table.remove(worker_id)
        await self._table.remove(worker_id + _SEEN)
        log.info("worker.unpaired worker=%s author=%r", worker_id, author)

    def authenticates(self, worker_id: str, authorization: bytes | None) -> bool:
        """Return whether this is the token of the worker; raise `PairingEnded` if of none now."""
        if not (authorization or b"").startswith(_BEARER):
            return False
        access = self._backend.paired.get(worker_id)
        if access is None or not matches_secret(authorization, access.token):
            raise PairingEnded
        return True

    async def certificates(self, report: WorkerReport) -> Certificates:
        """Return the ended pairings, and a certificate for a worker whose own one expires soon.

        A worker that was paired by an older version has the key of its first report with one.
        """
        worker_id, key = report.worker_id, report.public_key
        if worker_id not in self.by_worker or not key:
            return {}
        known = self._keys.get(worker_id)
        answer: Certificates = {"ended_pairings": [*self._ended][-_MAX_ENDED:]}
        due = report.certificate_until_s - self._wall() < RENEWED_S
        if due and (known is None or known.public_key == key):
            with contextlib.suppress(RecordsUnwritable):  # with one of the next heartbeats
                answer |= await self._certify(worker_id, key)
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

    async def fleet_id(self) -> str:
        """Return the id of the fleet, a random number that its first gateway has stored."""
        with contextlib.suppress(RecordsUnwritable):
            await self._table.add(_FLEET, json.dumps({"id": secrets.token_hex(8)}))
        return self._fleet_id

    async def _apply(self, texts: Mapping[str, str]) -> None:
        """Replace the tokens of the data plane; workers whose pairing has ended leave the fleet."""
        workers = {name: text for name, text in texts.items() if "/" not in name}
        before, self.by_worker = self.by_worker, self._reader.read(workers)
        at = self._at_reader.read(
            {n: t for n, t in texts.items() if n.endswith(_SEEN) or n.startswith(_ENDED)}
        )
        self.seen = {n.removesuffix(_SEEN): one.at for n, one in at.items() if n.endswith(_SEEN)}
        self._ended = {n.removeprefix(_ENDED): one for n, one in at.items() if n.startswith(_ENDED)}
        keys = self._key_reader.read({n: t for n, t in texts.items() if n.endswith(_KEY)})
        self._keys = {n.removesuffix(_KEY): one for n, one in keys.items()}
        self._fleet_id = str(json.loads(texts.get(_FLEET, "{}")).get("id", ""))
        number = str(json.loads(texts.get(_AUTHORITY, "{}")).get("number", ""))
        if number != self._authority_number:
            self._authority_number = number
            secret = hmac.digest(self._secret, f"paceline authority {number}".encode(), "sha256")
            self._authority = await asyncio.to_thread(Authority, secret)
        await self._renew_own()
        self._backend.paired = {
            name: Access(
                SecretStr(self._token(name, one)),
                self._server_name(name) if name in self._keys else "",
            )
            for name, one in self.by_worker.items()
        }
        for name in before.keys() - self.by_worker.keys():
            self._fleet.remove(name)

    def _token(self, worker_id: str, paired: PairedWorker) -> str:
        text = f"paceline paired worker {worker_id} {paired.number}".encode()
        return TOKEN_PREFIX + urlsafe_b64encode(hmac.digest(self._secret, text, "sha256")).decode()

    def _server_name(self, worker_id: str) -> str:
        text = f"paceline worker name {worker_id} {self.by_worker[worker_id].number}".encode()
        return hmac.digest(self._secret, text, "sha256")[:16].hex() + ".worker"

    async def _certify(self, worker_id: str, public_key: str) -> Certificates:
        """Store the public key of a worker; return its certificate, and that of the authority."""
        authority = await self._add_authority()
        if worker_id not in self._keys:
            key = _Key(public_key=public_key)
            await self._table.replace(worker_id + _KEY, key.model_dump_json())
        given = public_key, self._server_name(worker_id), self._wall()
        certificate = await asyncio.to_thread(authority.issue, *given)
        log.info("worker.certified worker=%s", worker_id)
        return {"certificate": certificate, "authority": authority.certificate}

    async def _add_authority(self) -> Authority:
        """Return the authority of the fleet, whose number its first gateway has stored."""
        if self._authority is None:
            await self._table.add(_AUTHORITY, json.dumps({"number": secrets.token_hex(16)}))
        assert self._authority is not None
        return self._authority

    async def _end_certificates(self, worker_id: str) -> None:
        """Let no worker admit the certificates of a pairing, and forget those that have expired."""
        for name, one in self._ended.items():
            if one.at < self._now():
                await self._table.remove(_ENDED + name)
        if worker_id in self._keys and worker_id in self.by_worker:
            until = _At(at=self._now() + timedelta(seconds=LIFE_S))
            name = _ENDED + self._server_name(worker_id)
            await self._table.replace(name, until.model_dump_json())
            await self._table.remove(worker_id + _KEY)

    async def _renew_own(self) -> None:
        """Give this gateway a new key and certificate, if it needs one and its own ends soon."""
        now_s = self._wall()
        if not self._keys or self._authority is None or self._tls_until_s - now_s >= RENEWED_S:
            return
        identity = await asyncio.to_thread(_identity_of_gateway, self._authority, now_s)
        identity.load(self._tls)
        self._tls_until_s = identity.until_s

    def _now(self) -> datetime:
        return datetime.fromtimestamp(int(self._wall()), UTC)


def _identity_of_gateway(authority: Authority, now_s: float) -> Identity:
    """Return a new identity; its key is in memory only."""
    new = Identity.new()
    certificate = authority.issue(new.public_key, _GATEWAY, now_s)
    return new.renewed(certificate, authority.certificate)
