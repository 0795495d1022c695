"""The book of the policy: all its versions, of which the newest is in force.

A version is added and never changed, and it is added only where nobody else has added one of its
number: so two admins who edit at once cannot overwrite each other, on whichever gateway, and what
is in force is always a version that was good. Gateways that share their records share the book.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.config.policy_versions import (
    Attribution,
    PolicyVersion,
    Proposal,
    Reason,
    check_workers,
    is_new,
    problems_text,
    propose,
)
from gateway.config.static_workers import ListedWorker
from gateway.errors import RecordsUnwritable, VersionConflict, VersionUnknown
from gateway.storage.records import Records
from policies.document import PolicyDocument, PolicyInvalid, Problem

log = logging.getLogger(__name__)

POLICY_KIND = "policy"
"""Of these records; the name of each is its number."""
Now = Callable[[], float]
"""Seconds since 1970: versions tell people when they were made."""
Warnings = Callable[[PolicyDocument], Sequence[Problem]]
"""Tell what a good policy would do that is perhaps not meant."""


def no_warnings(_policy: PolicyDocument) -> Sequence[Problem]:
    """Find nothing."""
    return ()


class PolicyStore:
    """The policy in force, and the only way to change it. `workers` are those listed by hand."""

    def __init__(
        self,
        records: Records,
        workers: Sequence[ListedWorker],
        now: Now,
        version: PolicyVersion,
        policy: PolicyDocument,
        *,
        warnings: Warnings,
    ) -> None:
        self._records = records
        self._workers = workers
        self._now = now
        self._unusable = 0
        self.warnings = warnings
        self.current = policy
        """What is in force now. Whoever needs it twice reads it once and keeps it."""
        self.version = version
        """The version that `current` is."""

    def check(self, proposal: Proposal) -> None:
        """Raise `PolicyInvalid` where a policy cannot be in force at this gateway."""
        check_workers(proposal, self._workers)

    async def require_version(self, etags: Collection[str]) -> PolicyVersion:
        """Return the version in force; raise `VersionConflict` where it has none of these tags."""
        if self.version.etag not in etags:
            await self.refresh()  # who edits may have asked another gateway, which was ahead
        if self.version.etag not in etags:
            raise self._overtaken()
        return self.version

    async def apply(
        self, proposal: Proposal, reason: Reason, signature: Attribution, *, onto: PolicyVersion
    ) -> PolicyVersion:
        """Put a policy in force in place of this version; raise `VersionConflict`."""
        if onto.etag != self.version.etag:
            raise self._overtaken()
        return await self._add(proposal, reason, signature, onto)

    async def apply_source(
        self, proposal: Proposal, reason: Reason, signature: Attribution
    ) -> None:
        """Put in force what the policy file says, where that is news."""
        while is_new(versions := await self.versions(), proposal.document, reason):
            last = max((self.version, *versions), key=lambda version: version.number)
            try:
                await self._add(proposal, reason, signature, last)
            except VersionConflict:  # another gateway, which may have read the same file
                continue

    async def versions(self) -> tuple[PolicyVersion, ...]:
        """Read all versions, oldest first."""
        with _legible():
            return await read_versions(self._records)

    async def read_version(self, number: int) -> PolicyVersion:
        """Find a version by its number; raise `VersionUnknown`."""
        for version in await self.versions():
            if version.number == number:
                return version
        raise VersionUnknown(number)

    async def refresh(self) -> None:
        """Follow the records, where another gateway has added to them."""
        kept = await self._records.all(POLICY_KIND)
        if not kept and self._records.is_current(POLICY_KIND):
            await self._begin()
            return
        with _legible():
            number = max((int(name) for name in kept), default=0)
            if number <= self.version.number or number == self._unusable:
                return
            version = PolicyVersion.from_json(kept[str(number)])
        try:
            proposal = await asyncio.to_thread(propose, version.document)
            self.check(proposal)
        except PolicyInvalid as invalid:
            self._unusable = number
            log.error("policy.unusable version=%d problems=%s", number, problems_text(invalid))
        else:
            self._turn_to(version, proposal.policy)

    async def _begin(self) -> None:
        """Add what is in force as the first version: at the start it could not be kept."""
        begun, signature = self.version, Attribution(self.version.author, self.version.note)
        first = PolicyVersion.following(None, begun.document, begun.reason, signature, begun.time)
        if begun.number < first.number and await self._records.add(
            POLICY_KIND, str(first.number), first.to_json()
        ):
            self._turn_to(first, self.current)

    async def _add(
        self, proposal: Proposal, reason: Reason, signature: Attribution, last: PolicyVersion
    ) -> PolicyVersion:
        """Add the version that follows another, unless somebody else has.

        Where nobody hears the end of it (a disk that hangs, a caller that leaves) it is kept, and
        `refresh` finds it, or it never was.
        """
        self.check(proposal)
        version = PolicyVersion.following(
            last, proposal.document, reason, signature, _utc(self._now())
        )
        if not await self._records.add(POLICY_KIND, str(version.number), version.to_json()):
            await self.refresh()
            raise self._overtaken()
        self._turn_to(version, proposal.policy)
        return version

    def _overtaken(self) -> VersionConflict:
        return VersionConflict(self.version.number, self.version.author)

    def _turn_to(self, version: PolicyVersion, policy: PolicyDocument) -> None:
        """Put a version in force, unless a later one is."""
        if version.number > self.version.number:
            self.current, self.version = policy, version
            log.info("policy.changed version=%d reason=%s", version.number, version.reason)
            for warning in self.warnings(policy):
                log.warning("policy.warning version=%d what=%s", version.number, warning.message)


class PolicySource(NamedTuple):
    """What a gateway is told at its start to be its policy: by a file, or by what is shipped."""

    proposal: Proposal
    reason: Reason
    signature: Attribution


async def open_policy_store(
    records: Records,
    workers: Sequence[ListedWorker],
    source: PolicySource,
    now: Now,
    warnings: Warnings = no_warnings,
) -> PolicyStore:
    """Open the book at its newest version, or at what the source says where that is news.

    Raise `PolicyInvalid` where neither can be in force, `ValueError` where the book is damaged.
    """
    versions = await read_versions(records)
    if not versions:
        check_workers(source.proposal, workers)
        first = PolicyVersion.following(
            None, source.proposal.document, source.reason, source.signature, _utc(now())
        )
        try:
            added = await records.add(POLICY_KIND, str(first.number), first.to_json())
        except RecordsUnwritable:
            if not records.remote:
                raise
            # In force until the records can be asked, and then the first version if there is none.
            first = replace(first, number=0, etag=f"0-{first.etag}")
            added = True
        if added:
            return PolicyStore(
                records, workers, now, first, source.proposal.policy, warnings=warnings
            )
        versions = await read_versions(records)  # another gateway begins at the same moment
    newest = versions[-1]
    if is_new(versions, source.proposal.document, source.reason):
        # What is about to be replaced need not be good: a new file is the way out of a bad one.
        book = PolicyStore(records, workers, now, newest, source.proposal.policy, warnings=warnings)
        try:
            await book.apply_source(*source)
            await book.refresh()
            return book
        except RecordsUnwritable:
            if not records.remote:
                raise
            if source.reason is Reason.FILE:
                return book  # in force; the watch takes it as soon as it can be kept
    kept = propose(newest.document)
    check_workers(kept, workers)
    return PolicyStore(records, workers, now, newest, kept.policy, warnings=warnings)


async def read_versions(records: Records) -> tuple[PolicyVersion, ...]:
    """Read all versions that are kept, oldest first; raise `ValueError` for a damaged one."""
    kept = await records.all(POLICY_KIND)
    versions = [PolicyVersion.from_json(text) for text in kept.values()]
    if [str(version.number) for version in versions] != list(kept):
        raise ValueError("a version under another's number")
    return tuple(sorted(versions, key=lambda version: version.number))


@contextlib.contextmanager
def _legible() -> Iterator[None]:
    """Say of records that cannot be understood what is said of those that cannot be read."""
    try:
        yield
    except (KeyError, ValueError) as damaged:
        raise RecordsUnwritable from damaged


def _utc(now_s: float) -> str:
    return f"{datetime.fromtimestamp(now_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
