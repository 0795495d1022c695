"""The versions of the policy: what each one says, and who made it when and why. Pure.

A policy that somebody offers, in both of its forms: to be obeyed, and to be kept. Pure.

Whatever is to be in force comes through here, so that there is one answer to what may be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter, ValidationError

from gateway.config.static_workers import ListedWorker, listed_problems
from policies.document import PolicyDocument, PolicyInvalid, Problem, parse_policy, read_policy

Document = dict[str, Any]
"""A policy as JSON holds it: what its writer said, and no default that they left out."""
_SOURCE = "proposed"


class Proposal(NamedTuple):
    """A policy that is good by itself."""

    policy: PolicyDocument
    document: Document

    @classmethod
    def of(cls, policy: PolicyDocument) -> Proposal:
        """Write a policy as it is kept, and work out here what requests need of it.

        With thousands of routes that takes longer than the first request should have to wait.
        """
        _ = policy.compiled
        return cls(policy, policy.model_dump(mode="json", exclude_unset=True))


def propose(value: Any) -> Proposal:
    """Read a policy from plain values; raise `PolicyInvalid`."""
    return Proposal.of(read_policy(value, _SOURCE))


def propose_yaml(text: str) -> Proposal:
    """Read a policy as people write it; raise `PolicyInvalid` with lines."""
    return Proposal.of(parse_policy(text, _SOURCE))


def check_workers(proposal: Proposal, workers: Sequence[ListedWorker]) -> None:
    """Raise `PolicyInvalid` where workers are listed for pools that the policy does not have.

    In force it would stop the next start.
    """
    problems = [Problem("pools", what) for what in listed_problems(workers, proposal.policy)]
    if problems:
        raise PolicyInvalid(_SOURCE, tuple(problems))


def problems_text(invalid: PolicyInvalid) -> str:
    """Tell in one line all that is wrong, without where it was read from."""
    return "; ".join(map(str, invalid.problems))


class Reason(StrEnum):
    """What made a version."""

    START = "start"
    """The shipped policy, which is where a gateway without a policy file begins."""
    FILE = "file"
    """The policy file, read at the start or edited since."""
    EDIT = "edit"
    """An admin, over the API."""
    ROLLBACK = "rollback"
    """An admin who went back to what an earlier version says."""


class Attribution(NamedTuple):
    """Who made a version, as they say themselves, and what for."""

    author: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """One version of the policy; once it is kept it never changes."""

    number: int
    etag: str
    """Names this version and no other, also where two say the same."""
    author: str
    time: str
    """UTC, as 2026-11-22T01:20:00Z."""
    note: str
    reason: Reason
    document: Document

    @classmethod
    def following(
        cls,
        last: PolicyVersion | None,
        document: Document,
        reason: Reason,
        signature: Attribution,
        time: str,
    ) -> Self:
        """Make the version that follows another, or the first one."""
        number = 1 if last is None else last.number + 1
        # All of it, so that two books that both begin at 1 do not share a tag.
        told = json.dumps([number, signature, time, reason, document], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()
        return cls(
            number=number,
            etag=f"{number}-{digest[:16]}",
            author=signature.author,
            time=time,
            note=signature.note,
            reason=reason,
            document=document,
        )

    @classmethod
    def from_json(cls, text: str) -> PolicyVersion:
        """Read a version as it was kept; raise `ValueError`."""
        try:
            return _VERSION.validate_json(text)
        except ValidationError:
            raise ValueError("not a version of a policy") from None

    def to_json(self) -> str:
        """Write it as it is kept."""
        return json.dumps(asdict(self))

    def metadata(self) -> dict[str, Any]:
        """Tell of it as JSON, without what it says."""
        return {name: getattr(self, name) for name in _TOLD}


_TOLD = ("number", "etag", "author", "time", "note", "reason")
_VERSION = TypeAdapter(PolicyVersion)


def is_new(versions: Sequence[PolicyVersion], document: Document, reason: Reason) -> bool:
    """Say whether what is read from the file, or shipped, must become the next version.

    A file is news once it says something else than when it was last read: so an admin's edit stays
    for as long as nobody edits the file. What is shipped is where a book begins, and follows an
    upgrade for as long as nobody has changed anything.
    """
    if not versions:
        return True
    if reason is Reason.START:
        newest = versions[-1]
        return newest.reason is Reason.START and newest.document != document
    last_read = next((one for one in reversed(versions) if one.reason is Reason.FILE), None)
    return last_read is None or last_read.document != document
