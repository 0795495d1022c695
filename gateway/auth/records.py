"""What is kept of a key: its terms and a digest of its secret, never the secret.

The digest is one round of SHA-256. A slow hash protects secrets that people choose, because those
can be guessed; these are 256 random bits, and guessing them fails at any speed. It would only make
each request, and each wrong key that a stranger sends, cost milliseconds.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from policies.base import Name
from policies.document import Priority

SECRET_PREFIX = "pk-"  # noqa: S105 - what every secret begins with
_SHOWN_CHARS = 8

# Nothing that a spreadsheet takes for a formula, or a log for the end of a line.
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@/-]{0,63}$")]
MaybeLabel = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9 ._@/-]{0,63})?$")]
_Names = Annotated[tuple[Name, ...], Field(strict=False, max_length=100)]


class Limits(BaseModel):
    """How much a key may use; None: as much as it likes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requests_a_minute: int | None = Field(default=None, ge=1, le=1_000_000)
    tokens_a_minute: int | None = Field(default=None, ge=1, le=1_000_000_000)
    concurrent_requests: int | None = Field(default=None, ge=1, le=10_000)
    tokens_a_day: int | None = Field(default=None, ge=1, le=1_000_000_000_000)

    @property
    def unlimited(self) -> bool:
        """Say whether nothing is limited."""
        return all(
            limit is None
            for limit in (
                self.requests_a_minute,
                self.tokens_a_minute,
                self.concurrent_requests,
                self.tokens_a_day,
            )
        )


class KeyTerms(Limits):
    """What an admin says of a key, and may change later."""

    name: Label
    """For people; two keys may share one."""
    team: MaybeLabel = ""
    models: _Names = ()
    """By their own names; none: all."""
    pools: _Names = ()
    """None: all."""
    priority: Annotated[Priority, Field(strict=False)] = Priority.INTERACTIVE
    """The highest that a request may ask for by header."""
    expires_at: AwareDatetime | None = None


class KeyRecord(KeyTerms):
    """One key as it is kept."""

    id: str = Field(pattern=r"^key-[0-9a-f]{12}$")
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    prefix: str
    """The first characters of the secret, by which people know it again."""
    created_at: AwareDatetime
    revoked_at: AwareDatetime | None = None

    @property
    def terms(self) -> KeyTerms:
        """What an admin said of it."""
        return KeyTerms.model_validate(self.model_dump(include=set(KeyTerms.model_fields)))

    def with_terms(self, terms: KeyTerms) -> KeyRecord:
        """Return the same key under other terms."""
        return KeyRecord.model_validate({**self.model_dump(), **terms.model_dump()})

    def ended(self, unix_s: float) -> str:
        """Say why it opens nothing any more; empty while it does."""
        if self.revoked_at is not None:
            return "revoked"
        expired = self.expires_at is not None and unix_s >= self.expires_at.timestamp()
        return "expired" if expired else ""


def digest_of(secret: bytes) -> bytes:
    """Turn a secret into what is kept and looked up."""
    return hashlib.sha256(secret).digest()


def new_key(terms: KeyTerms, now: datetime) -> tuple[KeyRecord, str]:
    """Make a key; its secret is in the second value and nowhere else."""
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    record = KeyRecord.model_validate(
        {
            **terms.model_dump(),
            "id": f"key-{secrets.token_hex(6)}",
            "digest": digest_of(secret.encode()).hex(),
            "prefix": secret[:_SHOWN_CHARS],
            "created_at": now,
        }
    )
    return record, secret
