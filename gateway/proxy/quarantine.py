"""Quarantine of request bodies that crash workers: blocked for a while after the second crash.

The system ends a worker whose prompt takes too much memory, so a body that every worker tries
would crash one after the other.
"""

from __future__ import annotations

import hashlib

from gateway.strict_json import Pieces

LOSSES = 2
KEPT_S = 600.0
_BODIES = 1024
"""The number of bodies stored; a new one replaces the oldest."""


_Suspects = dict[bytes, tuple[frozenset[str], float]]
"""By the digest of a body: the boots of workers, and until when they count."""


class Quarantine:
    """Digests of bodies whose worker was lost before the first byte of a response."""

    def __init__(self) -> None:
        self._suspects: _Suspects = {}
        self._failed: _Suspects = {}
        """Bodies that failed in any way, with the boots whose circuit breakers counted that."""

    def __len__(self) -> int:
        return sum(len(boots) >= LOSSES for boots, _ in self._suspects.values())

    def holds(self, body: Pieces, now_s: float) -> bool:
        """Return whether this body is blocked; without suspects that costs no digest."""
        if not self._suspects or (suspect := self._suspects.get(digest := _digest(body))) is None:
            return False
        boots, until_s = suspect
        if now_s >= until_s:
            del self._suspects[digest]
        return now_s < until_s and len(boots) >= LOSSES

    def lost(self, body: Pieces, boot: str, now_s: float) -> None:
        """Record that a boot of a worker was lost while it processed this body."""
        _record(self._suspects, body, boot, now_s)

    def failed(self, body: Pieces, boot: str, now_s: float) -> bool:
        """Record that a body failed at a boot of a worker; return whether it had not before."""
        return _record(self._failed, body, boot, now_s)

    def answered(self, body: Pieces) -> None:
        """Clear a body that a worker has answered: it did not cause the crash."""
        if self._suspects or self._failed:
            digest = _digest(body)
            self._suspects.pop(digest, None)
            self._failed.pop(digest, None)


def _record(suspects: _Suspects, body: Pieces, boot: str, now_s: float) -> bool:
    digest = _digest(body)
    boots, until_s = suspects.pop(digest, (frozenset[str](), 0.0))
    if now_s >= until_s:
        boots = frozenset()
    suspects[digest] = boots | {boot}, now_s + KEPT_S
    if len(suspects) > _BODIES:
        del suspects[next(iter(suspects))]
    return boot not in boots


def _digest(body: Pieces) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for piece in body:
        digest.update(piece)
    return digest.digest()
