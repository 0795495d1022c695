"""Keys as they are kept: made, changed and revoked through the records, read again and again."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from gateway.auth.api_keys import ApiKeys
from gateway.auth.records import KeyRecord, KeyTerms, new_key
from gateway.errors import KeyIsRevoked, KeyUnknown, StartupError
from gateway.storage.records import Records

log = logging.getLogger(__name__)

_KIND = "keys"
# A record of its own, which is only ever added: whoever changes a key at the same moment, here or
# in another gateway, cannot put back one that was not yet revoked.
_REVOKED = "/revoked"


class _Revocation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    revoked_at: AwareDatetime


class KeyStore:
    """All keys that were ever made; what it knows, its keyring holds."""

    def __init__(self, records: Records, keyring: ApiKeys, wall: Callable[[], float]) -> None:
        self._records = records
        self._keyring = keyring
        self._wall = wall
        self._texts: Mapping[str, str] = {}
        self._sure = False
        """The records have been read in this life, not only remembered."""
        self._reading = asyncio.Lock()
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """Read the keys; raise `StartupError` where one cannot be understood."""
        self._texts = await self._records.all(_KIND)
        keys, wrong = _read(self._texts)
        if wrong:
            raise StartupError(
                f"The key {wrong[0]} in the kept state cannot be understood; mend its record."
            )
        self._keyring.replace(keys)
        self._sure = self._records.is_current(_KIND)
        if not self._sure:
            # Keys that nobody can read now may have been made or revoked since.
            self._keyring.require_until_replaced()

    async def refresh(self) -> None:
        """Take over what others have changed; a record that cannot be understood opens nothing."""
        try:
            # One after the other: what was read first must not be taken last, and bring back a key.
            async with self._reading:
                texts = await self._records.all(_KIND)
                fresh = self._records.is_current(_KIND)
                if texts != self._texts or fresh != self._sure:
                    self._sure = fresh
                    self._take(texts)
        finally:
            self._keyring.remove_expired()  # a key expires whether or not its record can be read

    async def create(self, terms: KeyTerms) -> tuple[KeyRecord, str]:
        """Make a key; its secret is told here and never again."""
        record, secret = new_key(terms, self._now())
        while not await self._records.add(_KIND, record.id, record.model_dump_json()):
            record, secret = new_key(terms, self._now())  # of all ids it took one that is taken
        await self.refresh()
        log.info("key.created key=%s team=%s", record.id, record.team or "-")
        return record, secret

    async def change(self, name: str, terms: Callable[[KeyTerms], KeyTerms]) -> KeyRecord:
        """Put a key under other terms; raise `KeyUnknown`, or `KeyIsRevoked`."""
        async with self._changing:
            await self.refresh()
            record = self.find(name)
            if record.revoked_at is not None:
                raise KeyIsRevoked(name)
            changed = record.with_terms(terms(record.terms))
            kept = changed.model_dump_json(exclude={"revoked_at"})
            await self._records.replace(_KIND, name, kept)
            await self.refresh()
        log.info("key.changed key=%s", name)
        return self.find(name)

    async def revoke(self, name: str) -> KeyRecord:
        """End a key for good; once is enough, and more often does no harm."""
        await self.refresh()
        self.find(name)
        revoked = _Revocation(revoked_at=self._now())
        if await self._records.add(_KIND, name + _REVOKED, revoked.model_dump_json()):
            log.info("key.revoked key=%s", name)
        await self.refresh()
        return self.find(name)

    def find(self, name: str) -> KeyRecord:
        """Find a key by its id; raise `KeyUnknown`."""
        record = self._keyring.records.get(name)
        if record is None:
            raise KeyUnknown(name)
        return record

    def _take(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        keys, wrong = _read(texts)
        for name in wrong:
            log.error("key.unreadable key=%s", name)
        self._keyring.replace(keys)
        if not self._sure:
            self._keyring.require_until_replaced()

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall(), UTC)


def _read(texts: Mapping[str, str]) -> tuple[list[KeyRecord], list[str]]:
    """Read all keys, and name those that cannot be understood."""
    keys, wrong = [], []
    for name, text in texts.items():
        if name.endswith(_REVOKED):
            continue
        try:
            record = KeyRecord.model_validate_json(text)
            if name + _REVOKED in texts:
                revoked = _Revocation.model_validate_json(texts[name + _REVOKED])
                record = record.model_copy(update={"revoked_at": revoked.revoked_at})
            keys.append(record)
        except (ValidationError, json.JSONDecodeError):
            wrong.append(name)
    return keys, wrong
