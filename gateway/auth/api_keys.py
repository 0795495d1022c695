"""Who a secret belongs to: one hash and one look into a dictionary for each request.

Keys that a policy would strand: they name pools that it does not have. Pure.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pydantic import SecretStr

from gateway.auth.rate_limits import RateLimiter
from gateway.auth.records import KeyRecord, digest_of
from gateway.errors import KeyRefused, ModelUnknown
from gateway.types import Caller, Inspected
from policies.document import PolicyDocument, Priority, Problem

STATIC_KEY_ID = "static"
"""The id of PACELINE_API_KEY: a key without limits that is kept nowhere."""
_BEARER = b"bearer "
_HIGHEST_FIRST = tuple(Priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """Who holds a key, as a request needs it: all that can be known before it comes."""

    caller: Caller
    digest: bytes = b""
    models: frozenset[str] | None = None
    """None: all."""
    priorities: tuple[Priority, ...] = _HIGHEST_FIRST
    """Those that a request may ask for."""
    rate_limiter: RateLimiter | None = None
    """None: nothing is limited."""

    @property
    def unrestricted(self) -> bool:
        """Say whether nothing of the fleet is kept from this key."""
        return self.models is None and self.caller.pools is None

    def check_model(self, inspected: Inspected) -> None:
        """Raise `ModelUnknown` for a model that this key may not use.

        The same answer as for one that does not exist: a key learns no names beyond its own.
        """
        if self.models is not None and inspected.profile.model not in self.models:
            raise ModelUnknown(inspected.asked_model)


ANONYMOUS = ApiKey(caller=Caller())
"""Who asks where no key is needed."""


class ApiKeys:
    """The keys that open the data plane now. `clock` is monotonic, `wall` the time of the day.

    `used_on_day` tells the tokens that a key has used on the day of a moment. `on_end` gets the ids
    of keys that have expired or been revoked.

    A secret is looked up by its digest. How long that takes may depend on the digest, and nobody
    can make a secret whose digest comes close to another's: so time tells nothing that helps.
    Unknown, wrong, expired and revoked ones go the same way. Nothing is kept of those that fail.
    """

    def __init__(
        self,
        static: SecretStr | None,
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
        self._static: dict[bytes, ApiKey] = {}
        if static is not None and static.get_secret_value():
            digest = digest_of(static.get_secret_value().encode())
            caller = Caller(client=STATIC_KEY_ID, key=STATIC_KEY_ID)
            self._static[digest] = ApiKey(caller=caller, digest=digest)
        self._by_digest = dict(self._static)
        self._holders: dict[str, ApiKey] = {}
        self.records: Mapping[str, KeyRecord] = {}
        self._keyed = bool(self._static)
        self.required = self._keyed
        """Whether the data plane asks for a key. Never again no: once there was a key, a state that
        is lost or keys that are all revoked must not open it for everybody. Before it is known
        whether there are keys, yes."""

    def authenticate(self, authorization: bytes | None) -> ApiKey:
        """Say who bears this `Authorization`; raise `KeyRefused` for all who hold no key."""
        secret = bearer_token(authorization)
        if secret is None:
            raise KeyRefused
        digest = digest_of(secret)
        holder = self._by_digest.get(digest)
        if holder is None or not hmac.compare_digest(holder.digest, digest):
            raise KeyRefused
        return holder

    def accepts(self, authorization: bytes | None) -> bool:
        """Say whether this is a key of the data plane."""
        secret = bearer_token(authorization)
        return secret is not None and digest_of(secret) in self._by_digest

    def replace(self, records: Iterable[KeyRecord]) -> None:
        """Hold these keys, and no others, from now on."""
        self.records = {record.id: record for record in records}
        self._keyed = self._keyed or bool(self.records)
        self.required = self._keyed
        self._hold_those_that_open()

    def require_until_replaced(self) -> None:
        """Demand a key until `replace` is told again which there are."""
        self.required = True

    def require_always(self) -> None:
        """Demand a key from now on, also where there is none."""
        self._keyed = self.required = True

    def rate_limiters(self) -> list[tuple[str, RateLimiter]]:
        """List the limits of the keys that open something now, by the key's id."""
        holders = self._holders.items()
        return [(name, one.rate_limiter) for name, one in holders if one.rate_limiter is not None]

    def remove_expired(self) -> None:
        """Let go of keys whose time is over; to be called about once a second."""
        now_unix_s = self._wall()
        if any(self.records[name].ended(now_unix_s) for name in self._holders):
            self._hold_those_that_open()

    def _hold_those_that_open(self) -> None:
        now_unix_s = self._wall()
        open_now = [one for one in self.records.values() if not one.ended(now_unix_s)]
        held = {record.id: self._holder(record) for record in open_now}
        gone = frozenset(self._holders.keys() - held.keys())
        self._holders = held
        by_digest = {holder.digest: holder for holder in held.values()}
        self._by_digest = {**by_digest, **self._static}
        if gone:
            self._on_end(gone)

    def _holder(self, record: KeyRecord) -> ApiKey:
        before = self._holders.get(record.id)
        return ApiKey(
            caller=Caller(
                client=record.id,
                priority=max(record.priority, Priority.DEFAULT, key=_HIGHEST_FIRST.index),
                key=record.id,
                team=record.team,
                pools=frozenset(record.pools) or None,
            ),
            digest=bytes.fromhex(record.digest),
            models=frozenset(record.models) or None,
            priorities=_HIGHEST_FIRST[_HIGHEST_FIRST.index(record.priority) :],
            rate_limiter=self._allowance(record, before.rate_limiter if before else None),
        )

    def _allowance(self, record: KeyRecord, before: RateLimiter | None) -> RateLimiter | None:
        """Go on with what was counted so far: other limits are no new budget."""
        if record.unlimited:
            return None
        unix_s = self._wall()
        limits = (record, self._clock(), unix_s, self._used_on_day(record.id, unix_s))
        if before is None:
            return RateLimiter(*limits)
        before.update(*limits)
        return before


def bearer_token(authorization: bytes | None) -> bytes | None:
    """Take the secret out of an `Authorization` value; None where there is none."""
    if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
        return None
    return authorization[len(_BEARER) :].strip() or None


def matches_any_secret(authorization: bytes | None, *secrets_held: SecretStr | None) -> bool:
    """Say whether an `Authorization` value carries one of these secrets; unset ones never match."""
    offered = bearer_token(authorization)
    if offered is None:
        return False
    # Bytes, because compare_digest refuses non-ASCII text; all of them, so that time tells nothing.
    matches = [
        hmac.compare_digest(offered, held.get_secret_value().encode())
        for held in secrets_held
        if held is not None and held.get_secret_value()
    ]
    return any(matches)


def missing_pools(
    records: Iterable[KeyRecord], policy: PolicyDocument, unix_s: float
) -> list[Problem]:
    """Say of each key that still opens something which of its pools the policy does not have.

    Not a reason to refuse the policy: a key cannot name a pool before the policy has it, so where
    a pool gets another name the policy comes first and the keys follow.
    """
    return [
        Problem("pools", _sentence(record, missed, policy))
        for record in records
        if not record.ended(unix_s)
        and (missed := [pool for pool in record.pools if pool not in policy.pools])
    ]


def _sentence(record: KeyRecord, missed: list[str], policy: PolicyDocument) -> str:
    left = [pool for pool in record.pools if pool in policy.pools]
    rest = f"only {', '.join(left)} is left to it" if left else "it could use no pool at all"
    names = ", ".join(f"'{pool}'" for pool in missed)
    return f"the key {record.id} ({record.name}) names {names}, which is not there: {rest}"
