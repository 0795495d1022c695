"""Proposed policies and stored versions. Pure.

A policy passes through here before it is active, so that one place decides whether it is valid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict

from gateway.config.static_workers import StaticWorker, pool_problems
from policies.document import PolicyDocument, PolicyInvalid, Problem, parse_policy, read_policy

Document = dict[str, Any]
"""A policy as JSON, without the defaults that its author left out."""
_SOURCE = "proposed"


class Proposal(NamedTuple):
    """A valid policy, to evaluate and to store."""

    policy: PolicyDocument
    document: Document
    text: str = ""
    """The YAML of the author with its comments; empty without YAML."""

    @classmethod
    def of(cls, policy: PolicyDocument, text: str = "") -> Proposal:
        """Return the proposal of a policy, compiled.

        With thousands of routes that takes longer than the first request should wait.
        """
        _ = policy.compiled
        return cls(policy, policy.model_dump(mode="json", exclude_unset=True), text)

    @classmethod
    def from_document(cls, document: Any) -> Proposal:
        """Parse a policy from plain values; raise `PolicyInvalid`."""
        return cls.of(read_policy(document, _SOURCE))

    @classmethod
    def from_yaml(cls, text: str) -> Proposal:
        """Parse a policy from YAML; raise `PolicyInvalid` with line numbers."""
        return cls.of(parse_policy(text, _SOURCE), text)

    def check(self, workers: Sequence[StaticWorker]) -> None:
        """Raise `PolicyInvalid` if the policy lacks pools of static workers.

        In force, it would prevent the next start.
        """
        if problems := pool_problems(workers, self.policy):
            raise PolicyInvalid(_SOURCE, tuple(Problem("pools", text) for text in problems))


class Reason(StrEnum):
    """The origin of a version."""

    START = "start"
    """The shipped policy, for a gateway without a policy file."""
    FILE = "file"
    """The policy file, at the start or after an edit."""
    EDIT = "edit"
    """An admin's edit over the API."""
    ROLLBACK = "rollback"
    """An admin's return to the document of an earlier version."""


class Attribution(NamedTuple):
    """The author of a version, as stated by themselves, their note, and its origin."""

    author: str
    note: str
    reason: Reason


class VersionInfo(BaseModel):
    """A version of the policy, without its document."""

    model_config = ConfigDict(frozen=True)

    number: int
    etag: str
    """Identifies this version, also among versions with equal documents."""
    author: str
    time: str
    """UTC, as 2026-11-22T01:20:00Z."""
    note: str
    reason: Reason


class PolicyVersion(VersionInfo):
    """One version of the policy; it never changes."""

    document: Document
    text: str = ""
    """The YAML of the author with its comments; empty if the author sent JSON or a patch."""

    @classmethod
    def following(
        cls, last: int, document: Document, attribution: Attribution, time: str, text: str = ""
    ) -> Self:
        """Return the version that follows the one numbered `last`; 0: the first version."""
        number = last + 1
        content = {"document": document, "text": text}
        fields = {"number": number, "time": time, **content, **attribution._asdict()}
        # All fields, so that first versions of different gateways have different tags.
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        return cls(etag=f"{number}-{digest[:16]}", **fields)

    def holds(self, proposal: Proposal | PolicyVersion) -> bool:
        """Return whether a proposal has the content of this version.

        Another version of Paceline may write the document of the same text in another way.
        """
        same_text = bool(proposal.text) and self.text == proposal.text
        return same_text or self.document == proposal.document

    def means(self, proposal: Proposal) -> bool:
        """Return whether the document reads as this policy, in whatever way it is written."""
        try:
            return read_policy(self.document, _SOURCE) == proposal.policy
        except PolicyInvalid:
            return False


def is_new(
    versions: Sequence[PolicyVersion],
    proposal: Proposal,
    reason: Reason,
    last_read: PolicyVersion | None = None,
) -> bool:
    """Return whether the policy file, or the shipped policy, becomes the next version.

    Content that the history lacks does, and so does a file that somebody has changed back: it
    differs from the content that this gateway `last_read`, and no other gateway has applied that
    change since. An unchanged file never undoes an edit, whatever the other gateways read. The
    shipped policy follows an upgrade until the first edit or file.
    """
    if reason is Reason.START and versions and versions[-1].reason is not Reason.START:
        return False
    same = [one for one in versions if one.holds(proposal)]
    same = same or [one for one in versions if one.means(proposal)]
    if not same or reason is Reason.START or last_read is None or last_read.holds(proposal):
        return not same
    return not any(one.reason is Reason.FILE and one.number > last_read.number for one in same)


def newest_with(versions: Sequence[PolicyVersion], proposal: Proposal) -> PolicyVersion | None:
    """Return the newest version that has or means the content of a proposal, if one does."""
    same = (one for one in reversed(versions) if one.holds(proposal) or one.means(proposal))
    return next(same, None)
