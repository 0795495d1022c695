"""Keys that a policy would strand: they name pools that it does not have. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.auth.records import KeyRecord
from policies.document import PolicyDocument, Problem


def stranded_keys(
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
