"""The stored API keys: created, changed and revoked through the records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict

from gateway.auth.api_keys import ApiKeys
from gateway.auth.records import Digest, KeyRecord, KeyTerms, new_key, new_secret
from gateway.errors import KeyIsRevoked, KeyUnknown, RecordsUnwritable, RevocationUnstored
from gateway.state.records import RecordReader, Records, RecordTable, as_model

log = logging.getLogger(__name__)

# Records of their own, which are only ever added: a concurrent change of the key, at any gateway,
# can undo neither a revocation nor a new secret.
_REVOKED, _ROTATED = "/revoked", "/rotated/"


class _Revocation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    revoked_at: AwareDatetime


class _Rotation(BaseModel):
    """A new secret of a key, in place of another one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: Digest
    prefix: str
    ended: Digest
    rotated_at: AwareDatetime


class KeyStore:
    """All keys that were ever created, and the only way to change them.

    `api_keys` gets them after each change. `wall` returns seconds since 1970.
    """

    def __init__(self, records: Records, api_keys: ApiKeys, wall: Callable[[], float]) -> None:
        self._table = RecordTable(records, "keys", self._apply)
        self._api_keys = api_keys
        self._wall = wall
        self._keys = RecordReader(records, "keys", as_model(KeyRecord))
        self._revocations = RecordReader(records, "keys", as_model(_Revocation))
        self._rotations = RecordReader(records, "keys", as_model(_Rotation))
        self._changing = asyncio.Lock()

    async def refresh(self) -> None:
        """Apply the changes of other gateways, and remove expired keys."""
        try:
            await self._table.refresh()
        finally:
            self._api_keys.remove_expired()

    async def create(self, terms: KeyTerms) -> tuple[KeyRecord, str]:
        """Create a key; return its record and its secret, which is stored nowhere."""
        record, secret = new_key(terms, self._now())
        while not await self._table.add(record.id, record.model_dump_json()):
            record, secret = new_key(terms, self._now())  # the id exists
        log.info("key.created key=%s team=%s", record.id, record.team or "-")
        return record, secret

    async def change(self, key_id: str, new_terms: Callable[[KeyTerms], KeyTerms]) -> KeyRecord:
        """Change the terms of a key; raise `KeyUnknown`, or `KeyIsRevoked`."""
        async with self._changing:
            record = await self._unrevoked(key_id)
            changed = record.model_copy(update=dict(new_terms(record)))
            await self._table.replace(key_id, changed.model_dump_json(exclude={"revoked_at"}))
        log.info("key.changed key=%s", key_id)
        return self.find(key_id)

    async def rotate(self, key_id: str) -> tuple[KeyRecord, str]:
        """Give a key a new secret, and end the old one; return its record and the secret.

        Raise `KeyUnknown`, or `KeyIsRevoked`.
        """
        added = False
        while not added:  # another gateway may have rotated it
            ended = (await self._unrevoked(key_id)).digest
            secret, described = new_secret()
            rotation = _Rotation(**described, ended=ended, rotated_at=self._now())
            name = key_id + _ROTATED + ended[:16]
            added = await self._table.add(name, rotation.model_dump_json())
        log.info("key.rotated key=%s", key_id)
        return self.find(key_id), secret

    async def _unrevoked(self, key_id: str) -> KeyRecord:
        await self.refresh()
        record = self.find(key_id)
        if record.revoked_at is not None:
            raise KeyIsRevoked(key_id)
        return record

    async def revoke(self, key_id: str) -> KeyRecord:
        """Revoke a key for good; a second revocation changes nothing.

        Raise `KeyUnknown`, or `RevocationUnstored`: it holds here, and is stored once possible.
        """
        await self.refresh()
        self.find(key_id)
        name, text = key_id + _REVOKED, _Revocation(revoked_at=self._now()).model_dump_json()
        try:
            if await self._table.add(name, text):
                log.info("key.revoked key=%s", key_id)
        except RecordsUnwritable:
            await self._table.hold(name, text)
            log.warning("key.revocation_unstored key=%s", key_id)
            raise RevocationUnstored from None
        return self.find(key_id)

    def find(self, key_id: str) -> KeyRecord:
        """Return a key by its id; raise `KeyUnknown`."""
        record = self._api_keys.records.get(key_id)
        if record is None:
            raise KeyUnknown(key_id)
        return record

    async def _apply(self, texts: Mapping[str, str]) -> None:
        """Replace the keys of the data plane; an unreadable record authenticates nothing."""
        keys = self._keys.read({name: texts[name] for name in texts if "/" not in name})
        revocations = self._revocations.read(
            {name: texts[name] for name in texts if name.endswith(_REVOKED)}
        )
        rotations = self._rotations.read({name: texts[name] for name in texts if _ROTATED in name})
        rotated = {
            bytes.fromhex(one.ended): (name.partition("/")[0], one.rotated_at)
            for name, one in rotations.items()
        }
        valid = []
        for key_id, stored in keys.items():
            record: KeyRecord | None = stored
            while record and (name := key_id + _ROTATED + record.digest[:16]) in texts:
                new = rotations.pop(name, None)  # one that cannot be read ends the old secret too
                update = new and new.model_dump(include={"digest", "prefix"})
                record = record.model_copy(update=update) if update else None
            if record is None:
                continue
            if (name := key_id + _REVOKED) not in texts:
                valid.append(record)
            elif name in revocations:
                valid.append(record.model_copy(update=dict(revocations[name])))
        if texts:  # also where none can be read
            self._api_keys.require_always()
        self._api_keys.replace(valid, rotated)
        if not self._table.current:
            # Keys may have been created or revoked since the copy was written; until the next read.
            self._api_keys.required = True

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall(), UTC)
