"""The active policy, and all its versions, of which the newest is active.

A version is only ever added, and only if its number is free. So of two admins who edit at once, at
any gateways, neither overwrites the other, and the active policy was always valid. Gateways that
share their records share the versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from gateway.config.policy_versions import Attribution, PolicyVersion, Proposal, Reason, is_new
from gateway.config.static_workers import StaticWorker
from gateway.errors import RecordsUnwritable, VersionConflict, VersionUnknown
from gateway.storage.records import Records, RecordTable
from policies.document import PolicyDocument, PolicyInvalid, Problem

log = logging.getLogger(__name__)

POLICY_KIND = "policy"
"""The kind of these records; the name of each is its number."""
Warnings = Callable[[PolicyDocument], Sequence[Problem]]
"""Returns effects of a valid policy that are perhaps not intended."""


class PolicyStore:
    """The active policy, and the only way to change it. `wall` returns seconds since 1970."""

    def __init__(
        self,
        records: Records,
        static_workers: Sequence[StaticWorker],
        wall: Callable[[], float],
        warnings: Warnings,
        *,
        version: PolicyVersion,
        policy: PolicyDocument,
    ) -> None:
        self._records = records
        self._table = RecordTable(records, POLICY_KIND, self._apply_records)
        self._static_workers = static_workers
        self._wall = wall
        self.warnings = warnings
        self.current = policy
        """The active policy. It may be replaced between two reads."""
        self.version = version
        """The version of `current`."""

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

    async def apply_source(self, proposal: Proposal, attribution: Attribution) -> None:
        """Apply the policy file if it is new."""
        while is_new(versions := await self.versions(), proposal.document, attribution.reason):
            last = max((self.version, *versions), key=lambda version: version.number)
            try:
                await self._add(proposal, attribution, last)
            except VersionConflict:  # with another gateway, which may have read the same file
                continue

    async def versions(self) -> tuple[PolicyVersion, ...]:
        """Return all versions, oldest first."""
        with _damage_as_unwritable():
            return await read_versions(self._records)

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
        with _damage_as_unwritable():
            number = max((int(name) for name in texts), default=0)
            if number <= self.version.number:
                return
            version = PolicyVersion.model_validate_json(texts[str(number)])
        try:
            proposal = await asyncio.to_thread(Proposal.from_document, version.document)
            self.check(proposal)
        except PolicyInvalid as invalid:
            log.error("policy.unusable version=%d problems=%s", number, invalid.reasons)
        else:
            self._put_in_force(version, proposal.policy)

    async def _add_first(self) -> None:
        """Add the active policy as the first version, if the start could not do so."""
        begun = self.version
        attribution = Attribution(begun.author, begun.note, begun.reason)
        first = PolicyVersion.following(0, begun.document, attribution, begun.time)
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
        version = PolicyVersion.following(last.number, proposal.document, attribution, time)
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
            log.info("policy.changed version=%d reason=%s", version.number, version.reason)
            for warning in self.warnings(policy):
                log.warning("policy.warning version=%d message=%s", version.number, warning.message)


async def open_policy_store(
    records: Records,
    static_workers: Sequence[StaticWorker],
    source: tuple[Proposal, Attribution],
    wall: Callable[[], float],
    warnings: Warnings = lambda _policy: (),
) -> PolicyStore:
    """Open the store at its newest version, or at the source if that is new.

    `source` is the policy of the policy file, or the shipped one. Raise `PolicyInvalid` if neither
    is valid here, `ValueError` if the records are damaged.
    """
    store = functools.partial(PolicyStore, records, static_workers, wall, warnings)
    proposal, attribution = source
    versions = await read_versions(records)
    if not versions:
        proposal.check(static_workers)
        first = PolicyVersion.following(0, proposal.document, attribution, _utc(wall()))
        try:
            added = await _add_version(records, first)
        except RecordsUnwritable:
            if not records.remote:
                raise
            # In force until the records can be read; added then if there is no first version.
            first = first.model_copy(update={"number": 0, "etag": f"0-{first.etag}"})
            added = True
        if added:
            return store(version=first, policy=proposal.policy)
        versions = await read_versions(records)  # another gateway started at the same moment
    newest = versions[-1]
    if is_new(versions, proposal.document, attribution.reason):
        # The version to replace may be invalid: a new file is the way to repair it.
        opened = store(version=newest, policy=proposal.policy)
        try:
            await opened.apply_source(proposal, attribution)
            await opened.refresh()
            return opened
        except RecordsUnwritable:
            if not records.remote:
                raise
            if attribution.reason is Reason.FILE:
                return opened  # active; stored as soon as the records can be written
    current = Proposal.from_document(newest.document)
    current.check(static_workers)
    return store(version=newest, policy=current.policy)


async def read_versions(records: Records) -> tuple[PolicyVersion, ...]:
    """Return all stored versions, oldest first; raise `ValueError` for a damaged one."""
    texts = await records.all(POLICY_KIND)
    versions = [PolicyVersion.model_validate_json(text) for text in texts.values()]
    if [str(version.number) for version in versions] != list(texts):
        raise ValueError("a version under the number of another one")
    return tuple(sorted(versions, key=lambda version: version.number))


async def _add_version(records: Records, version: PolicyVersion) -> bool:
    """Store a version; return False if its number is taken."""
    return await records.add(POLICY_KIND, str(version.number), version.model_dump_json())


@contextlib.contextmanager
def _damage_as_unwritable() -> Iterator[None]:
    """Raise `RecordsUnwritable` for damaged records."""
    try:
        yield
    except (KeyError, ValueError) as damaged:
        raise RecordsUnwritable from damaged


def _utc(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
