"""The versions of the policy: what each one says, and who made it when and why. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter, ValidationError

from gateway.proposal import Document


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


class Signature(NamedTuple):
    """Who made a version, as they say themselves, and what for."""

    author: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
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
    def after(
        cls,
        last: Version | None,
        document: Document,
        reason: Reason,
        signature: Signature,
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
    def read(cls, text: str) -> Version:
        """Read a version as it was kept; raise `ValueError`."""
        try:
            return _VERSION.validate_json(text)
        except ValidationError:
            raise ValueError("not a version of a policy") from None

    def written(self) -> str:
        """Write it as it is kept."""
        return json.dumps(asdict(self))

    def told(self) -> dict[str, Any]:
        """Tell of it as JSON, without what it says."""
        return {name: getattr(self, name) for name in _TOLD}


_TOLD = ("number", "etag", "author", "time", "note", "reason")
_VERSION = TypeAdapter(Version)


def brings_news(versions: Sequence[Version], document: Document, reason: Reason) -> bool:
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
