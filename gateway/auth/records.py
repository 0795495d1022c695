"""The stored record of a key: its terms and a digest of its secret, never the secret.

The digest is one round of SHA-256. Slow hashes protect secrets that people choose, which can be
guessed; these are 256 random bits. A slow hash would only make each request, and each wrong key,
cost milliseconds.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime
from math import inf
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from paceline.names import Name, OneModel
from paceline.request.profile import Priority

SECRET_PREFIX = "pk-"  # noqa: S105  # the prefix of every secret
_SHOWN_CHARS = 8

# No character that starts a formula in a spreadsheet or ends a line of a log.
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@/-]{0,63}$")]
MaybeLabel = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9 ._@/-]{0,63})?$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
_Names = Annotated[tuple[Name, ...], Field(strict=False, max_length=100)]


class Limits(BaseModel):
    """The limits of a key; None: unlimited."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requests_a_minute: int | None = Field(default=None, ge=1, le=1_000_000)
    tokens_a_minute: int | None = Field(default=None, ge=1, le=1_000_000_000)
    concurrent_requests: int | None = Field(default=None, ge=1, le=10_000)
    tokens_a_day: int | None = Field(default=None, ge=1, le=1_000_000_000_000)

    @property
    def unlimited(self) -> bool:
        """Return whether there is no limit."""
        return all(getattr(self, name) is None for name in Limits.model_fields)


class KeyTerms(Limits):
    """The terms of a key, which an admin may change."""

    name: Label
    """For people: no two active keys have one."""
    team: MaybeLabel = ""
    models: Annotated[tuple[OneModel, ...], Field(strict=False, max_length=100)] = ()
    """By their own names; empty: all."""
    pools: _Names = ()
    """Empty: all."""
    priority: Annotated[Priority, Field(strict=False)] = Priority.INTERACTIVE
    """The highest that a request may set by header."""
    expires_at: AwareDatetime | None = None


class KeyRecord(KeyTerms):
    """One stored key."""

    id: str = Field(pattern=r"^key-[0-9a-f]{12}$")
    digest: Digest
    prefix: str
    """The first characters of the secret, for people to recognise it."""
    created_at: AwareDatetime
    revoked_at: AwareDatetime | None = None

    def ended(self, unix_s: float) -> str:
        """Return why the key is invalid, or an empty string."""
        if self.revoked_at is not None:
            return "revoked"
        expired = self.expires_at is not None and unix_s >= self.expires_at.timestamp()
        return "expired" if expired else ""

    @property
    def ended_at_s(self) -> float:
        """Return when the key ended or ends, in seconds since 1970; infinity if never."""
        ends = [end.timestamp() for end in (self.revoked_at, self.expires_at) if end is not None]
        return min(ends, default=inf)


def digest_of(secret: bytes) -> bytes:
    """Return the digest that identifies a secret in the store."""
    return hashlib.sha256(secret).digest()


def new_secret() -> tuple[str, dict[str, Any]]:
    """Return a new secret and the fields of a record that describe it."""
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    return secret, {"digest": digest_of(secret.encode()).hex(), "prefix": secret[:_SHOWN_CHARS]}


def new_key(terms: KeyTerms, now: datetime) -> tuple[KeyRecord, str]:
    """Create a key; return its record and its secret."""
    secret, described = new_secret()
    key_id = f"key-{secrets.token_hex(6)}"
    return KeyRecord(**dict(terms), **described, id=key_id, created_at=now), secret
