"""API keys as the data plane checks them: one hash and one dictionary lookup a request."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from pydantic import SecretStr

from gateway.auth.rate_limits import RateLimiter
from gateway.auth.records import KeyRecord, digest_of
from gateway.errors import EndedKeyRefused, KeyRefused, ModelUnknown
from gateway.types import Caller, Inspected
from paceline.request.profile import Priority
from policies.document import PolicyDocument, Problem

STATIC_KEY_ID, ADMIN_KEY_ID = "static", "admin"
"""The ids of PACELINE_API_KEY and the admin key, which lack limits and records."""
_BEARER = b"bearer "
_HIGHEST_FIRST = tuple(Priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key with all that a request needs of it, computed in advance."""

    caller: Caller
    models: frozenset[str] | None = None
    """None: all."""
    priorities: tuple[Priority, ...] = _HIGHEST_FIRST
    """The priorities that a request may set."""
    rate_limiter: RateLimiter | None = None
    """None: no limits."""

    def check_model(self, inspected: Inspected) -> None:
        """Raise `ModelUnknown` for a model that this key may not use.

        It gets the same response as an unknown model, which reveals no names.
        """
        if self.models is not None and inspected.profile.model not in self.models:
            raise ModelUnknown(inspected.asked_model)


ANONYMOUS = ApiKey(caller=Caller())
"""The caller where no key is required."""


class ApiKeys:
    """The valid keys of the data plane. `clock` is monotonic, `wall` returns seconds since 1970.

    `used_on_day` returns the tokens that a key has used on the day of a time. `on_end` gets the ids
    of keys that have expired or been revoked.

    A secret is looked up by its digest. The duration may depend on the digest, but a secret with a
    similar digest cannot be constructed, so the duration reveals nothing. Nothing of an unknown
    secret is stored; only the holder of an ended one learns that it has ended.
    """

    def __init__(
        self,
        static: SecretStr | None,
        admin: SecretStr | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
        used_on_day: Callable[[str, float], int],
        *,
        on_end: Callable[[frozenset[str]], None],
    ) -> None:
        self._on_end = on_end
        self._clock = clock
        self._wall = wall
        self._used_on_day = used_on_day
        self._static = {
            digest_of(one.get_secret_value().encode()): ApiKey(caller=Caller(client=name, key=name))
            for name, one in ((STATIC_KEY_ID, static), (ADMIN_KEY_ID, admin))
            if one is not None and one.get_secret_value()
        }
        self._by_digest = dict(self._static)
        self._valid: dict[str, ApiKey] = {}
        self.records: Mapping[str, KeyRecord] = {}
        self._rotated: Mapping[bytes, tuple[str, datetime]] = {}
        self._ended: dict[bytes, tuple[str, str, datetime]] = {}
        """The key of each ended secret, how it ended and when."""
        self._had_keys = bool(static is not None and static.get_secret_value())
        self.required = self._had_keys
        """Whether the data plane requires a key. Once there was a key it stays True: lost state or
        revoked keys must not open the data plane. True also before the keys are read."""

    def authenticate(self, authorization: bytes | None, bare: bytes | None = None) -> ApiKey:
        """Return the key of an `Authorization` header, or else a bare one; raise `KeyRefused`."""
        secret = bearer_token(authorization) or bare
        digest = b"" if secret is None else digest_of(secret)
        api_key = self._by_digest.get(digest)
        if api_key is None:
            if digest in self._ended:
                raise EndedKeyRefused(*self._ended[digest])
            raise KeyRefused
        return api_key

    def replace(
        self, records: Iterable[KeyRecord], rotated: Mapping[bytes, tuple[str, datetime]]
    ) -> None:
        """Replace all keys; `rotated` has the digests of earlier secrets, their keys and ends."""
        self.records, self._rotated = {record.id: record for record in records}, rotated
        self._had_keys = self._had_keys or bool(self.records)
        self.required = self._had_keys
        self._rebuild()

    def require_always(self) -> None:
        """Require a key from now on, even if no key exists."""
        self._had_keys = self.required = True

    def rate_limiters(self) -> list[tuple[str, RateLimiter]]:
        """Return the rate limiters of all valid keys, with the id of the key."""
        holders = self._valid.items()
        return [(name, one.rate_limiter) for name, one in holders if one.rate_limiter is not None]

    def callers_since(self, unix_s: float) -> tuple[list[Caller], list[Caller]]:
        """Return the callers of all valid keys, and of keys that ended since a time."""
        now_unix_s = self._wall()
        ended = [
            Caller(client=one.id, key=one.id, team=one.team)
            for one in self.records.values()
            if one.ended(now_unix_s) and one.ended_at_s >= unix_s
        ]
        return [one.caller for one in self._valid.values()], ended

    def remove_expired(self) -> None:
        """Remove the keys that have expired, and those not that had when the clock was wrong."""
        now_unix_s = self._wall()
        valid = {name for name, one in self.records.items() if not one.ended(now_unix_s)}
        if valid != self._valid.keys():
            self._rebuild()

    def _rebuild(self) -> None:
        now_unix_s = self._wall()
        records = [one for one in self.records.values() if not one.ended(now_unix_s)]
        before, self._valid = self._valid, {one.id: self._api_key(one) for one in records}
        by_digest = {bytes.fromhex(one.digest): self._valid[one.id] for one in records}
        self._by_digest = {**by_digest, **self._static}
        self._ended = {digest: (key, "replaced", at) for digest, (key, at) in self._rotated.items()}
        for one in self.records.values():
            if (how := one.ended(now_unix_s)) and (at := one.revoked_at or one.expires_at):
                self._ended[bytes.fromhex(one.digest)] = (one.id, how, at)
        if ended := frozenset(before.keys() - self._valid.keys()):
            self._on_end(ended)

    def _api_key(self, record: KeyRecord) -> ApiKey:
        return ApiKey(
            caller=Caller(
                client=record.id,
                priority=max(record.priority, Priority.DEFAULT, key=_HIGHEST_FIRST.index),
                key=record.id,
                team=record.team,
                pools=frozenset(record.pools) or None,
            ),
            models=frozenset(record.models) or None,
            priorities=_HIGHEST_FIRST[_HIGHEST_FIRST.index(record.priority) :],
            rate_limiter=self._limiter(record),
        )

    def _limiter(self, record: KeyRecord) -> RateLimiter | None:
        """Return the limiter of a key; changed limits keep the usage."""
        if record.unlimited:
            return None
        unix_s = self._wall()
        limits = (record, self._clock(), unix_s, self._used_on_day(record.id, unix_s))
        before = self._valid.get(record.id)
        if before is None or before.rate_limiter is None:
            return RateLimiter(*limits)
        before.rate_limiter.update(*limits)
        return before.rate_limiter


def bearer_token(authorization: bytes | None) -> bytes | None:
    """Return the secret of an `Authorization` value, or None."""
    if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
        return None
    return authorization[len(_BEARER) :].strip() or None


def matches_secret(authorization: bytes | None, secret: SecretStr | None) -> bool:
    """Return whether an `Authorization` value has this secret; an unset one never matches."""
    offered = bearer_token(authorization)
    if offered is None or secret is None:
        return False
    # Bytes, because compare_digest rejects non-ASCII text.
    return hmac.compare_digest(offered, secret.get_secret_value().encode())


def missing_pools(
    records: Iterable[KeyRecord], policy: PolicyDocument, unix_s: float
) -> list[Problem]:
    """Return the pools of valid keys that the policy lacks, as warnings.

    They do not make the policy invalid: when a pool is renamed, the policy changes first, because
    a key cannot name a pool that the policy does not have.
    """
    problems = []
    for record in records:
        left = [pool for pool in record.pools if pool in policy.pools]
        missed = ", ".join(f"'{pool}'" for pool in record.pools if pool not in policy.pools)
        if missed and not record.ended(unix_s):
            rest = f"it could use only {', '.join(left)}" if left else "it could use no pool"
            lacks = f"names {missed}, which the policy does not contain"
            problems.append(
                Problem("pools", f"the key {record.id} ({record.name}) {lacks}; {rest}")
            )
    return problems
