"""The active policy, and all its versions, of which the newest is active.

A version is only ever added, and only if its number is free. So of two admins who edit at once, at
any gateways, neither overwrites the other, and the active policy was always valid. Gateways that
share their records share the versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Self

from gateway.config.policy_versions import (
    Attribution,
    PolicyVersion,
    Proposal,
    Reason,
    is_new,
    newest_with,
)
from gateway.config.static_workers import StaticWorker
from gateway.errors import RecordsUnwritable, VersionConflict, VersionUnknown
from gateway.state.records import RecordReader, Records, RecordTable
from policies.document import PolicyDocument, PolicyInvalid, Problem

log = logging.getLogger(__name__)

POLICY_KIND = "policy"
"""The kind of these records; the name of each is its number."""
# No more digits than a time in milliseconds has.
_NUMBER = re.compile(r"[1-9][0-9]{0,12}")
_Usable = tuple[PolicyVersion, Proposal]
Warnings = Callable[[PolicyDocument], Sequence[Problem]]
"""Returns effects of a valid policy that are perhaps not intended."""


class PolicyStore:
    """The active policy, and the only way to change it. `wall` returns seconds since 1970."""

    def __init__(
        self,
        records: Records,
        static_workers: Sequence[StaticWorker],
        source: tuple[Proposal, Attribution],
        wall: Callable[[], float],
        warnings: Warnings = lambda _policy: (),
    ) -> None:
        proposal, attribution = source
        self._records = records
        self._table = RecordTable(records, POLICY_KIND, self._apply_records)
        self._static_workers = static_workers
        self._source = source
        self._wall = wall
        self.warnings = warnings
        self._reader = RecordReader(records, POLICY_KIND, _read_usable)
        self.current = proposal.policy
        """The active policy. It may be replaced between two reads."""
        first = PolicyVersion.following(
            0, proposal.document, attribution, _utc(wall()), proposal.text
        )
        self.version = first.model_copy(update={"number": 0, "etag": f"0-{first.etag}"})
        """The version of `current`; number 0 is not stored."""

    async def open(self, last_read: PolicyVersion | None = None) -> Self:
        """Activate the newest version, or the source if that is new; return the store.

        The source is the policy of the policy file, or the shipped one; `last_read` is what this
        gateway read before. A version that this Paceline cannot use, because it is damaged or has
        other rules, is skipped; it is not replaced. Raise `PolicyInvalid` if no other is valid
        here.
        """
        texts = await self._records.all(POLICY_KIND)
        newest = self._newest(texts)
        proposal, attribution = self._source
        told = proposal, attribution.reason, last_read
        if await asyncio.to_thread(is_new, _readable(texts), *told):
            if newest is not None:  # it may not fit the static workers: a new file repairs that
                self.version = newest[0]
            try:
                await self.apply_source(proposal, attribution, last_read)
                await self.refresh()
                return self
            except RecordsUnwritable:
                if not self._records.remote:
                    raise
                if newest is None or attribution.reason is Reason.FILE:
                    return self  # active; stored as soon as the records can be written
        if newest is None:
            self.check(proposal)
        else:
            self.check(newest[1])
            self.version, self.current = newest[0], newest[1].policy
        return self

    def check(self, proposal: Proposal) -> None:
        """Raise `PolicyInvalid` if a policy does not fit the static workers of this gateway."""
        proposal.check(self._static_workers)

    async def require_version(self, etags: Collection[str]) -> PolicyVersion:
        """Return the active version; raise `VersionConflict` if it has none of these tags."""
        if self.version.etag not in etags:
            await self.refresh()  # the tag may come from another gateway, which was ahead
        if self.version.etag not in etags:
            raise self._conflict()
        return self.version

    async def apply(
        self, proposal: Proposal, attribution: Attribution, *, onto: PolicyVersion
    ) -> PolicyVersion:
        """Replace this version by another policy; raise `VersionConflict`."""
        if onto.etag != self.version.etag:
            raise self._conflict()
        return await self._add(proposal, attribution, onto)

    async def apply_source(
        self,
        proposal: Proposal,
        attribution: Attribution,
        last_read: PolicyVersion | None = None,
    ) -> PolicyVersion | None:
        """Apply the policy file if it is new; return the newest version with its content."""
        told = proposal, attribution.reason, last_read
        while await asyncio.to_thread(is_new, versions := await self.versions(), *told):
            last = max((self.version, *versions), key=lambda version: version.number)
            try:
                return await self._add(proposal, attribution, last)
            except VersionConflict:  # with another gateway, which may have read the same file
                continue
        return await asyncio.to_thread(newest_with, versions, proposal)

    async def versions(self) -> tuple[PolicyVersion, ...]:
        """Return all versions, oldest first."""
        return _readable(await self._records.all(POLICY_KIND))

    async def read_version(self, number: int) -> PolicyVersion:
        """Return a version by its number; raise `VersionUnknown`."""
        for version in await self.versions():
            if version.number == number:
                return version
        raise VersionUnknown(number)

    async def refresh(self) -> None:
        """Activate the newest version, if another gateway has added one."""
        await self._table.refresh()

    async def _apply_records(self, texts: Mapping[str, str]) -> None:
        if not texts and self._table.current:
            await self._add_first()
            return
        newer = {name: text for name, text in texts.items() if _number(name) > self.version.number}
        newest = await asyncio.to_thread(self._newest, newer)
        if newest is None:
            return
        version, proposal = newest
        try:
            self.check(proposal)
        except PolicyInvalid as invalid:
            name = str(version.number)
            self._reader.skip(name, texts[name], invalid)
        else:
            self._put_in_force(version, proposal.policy)

    def _newest(self, texts: Mapping[str, str]) -> _Usable | None:
        """Return the newest version that can be used here."""
        numbers = sorted(texts, key=_number, reverse=True)
        usable = self._reader.read({name: texts[name] for name in numbers}, limit=1)
        return next(iter(usable.values()), None)

    async def _add_first(self) -> None:
        """Add the active policy as the first version, if the start could not do so."""
        begun = self.version
        attribution = Attribution(begun.author, begun.note, begun.reason)
        first = PolicyVersion.following(0, begun.document, attribution, begun.time, begun.text)
        if begun.number < first.number and await _add_version(self._records, first):
            self._put_in_force(first, self.current)

    async def _add(
        self, proposal: Proposal, attribution: Attribution, last: PolicyVersion
    ) -> PolicyVersion:
        """Add the version that follows another; raise `VersionConflict` if its number is taken.

        After an unconfirmed write the version may be stored; the next `refresh` finds it then.
        """
        self.check(proposal)
        time = _utc(self._wall())
        # The number of a skipped version is taken too.
        number = max((last.number, *map(_number, self._reader.skipped)))
        version = PolicyVersion.following(
            number, proposal.document, attribution, time, proposal.text
        )
        if not await _add_version(self._records, version):
            await self.refresh()
            raise self._conflict()
        self._put_in_force(version, proposal.policy)
        return version

    def _conflict(self) -> VersionConflict:
        return VersionConflict(self.version.number, self.version.author)

    def _put_in_force(self, version: PolicyVersion, policy: PolicyDocument) -> None:
        """Activate a version, unless a later one is active."""
        if version.number > self.version.number:
            self.current, self.version = policy, version
            told = version.number, version.reason, version.author, version.note
            log.info("policy.changed version=%d reason=%s author=%r note=%r", *told)
            for warning in self.warnings(policy):
                log.warning("policy.warning version=%d message=%s", version.number, warning.message)


def _readable(texts: Mapping[str, str]) -> tuple[PolicyVersion, ...]:
    """Return the readable versions, oldest first; their policies may be unusable here."""
    versions = []
    for name, text in texts.items():
        with contextlib.suppress(ValueError):
            versions.append(_read_version(name, text))
    return tuple(sorted(versions, key=lambda version: version.number))


def _read_version(name: str, text: str) -> PolicyVersion:
    """Parse a version; raise `ValueError`."""
    version = PolicyVersion.model_validate_json(text)
    if str(version.number) != name:
        raise ValueError("a version under the number of another one")
    return version


def _read_usable(name: str, text: str) -> _Usable:
    """Parse a version and its policy; raise `ValueError`."""
    version = _read_version(name, text)
    try:
        return version, Proposal.from_document(version.document)
    except PolicyInvalid as invalid:
        raise ValueError(invalid.reasons) from None


def _number(name: str) -> int:
    """Return the number of a version by the name of its record; 0 for any other name."""
    return int(name) if _NUMBER.fullmatch(name) else 0


async def _add_version(records: Records, version: PolicyVersion) -> bool:
    """Store a version; return False if its number is taken."""
    return await records.add(POLICY_KIND, str(version.number), version.model_dump_json())


def _utc(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
