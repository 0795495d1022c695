"""Bodies that workers died of: after the second loss they are not sent any more for a while.

MLX aborts its whole process when a prompt is too much for it, so a body that is tried again
everywhere would take down one worker after the other. Pure: the clock is passed in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

LOSSES = 2
KEPT_S = 600.0
_BODIES = 1024
"""As many are remembered; the oldest is forgotten first."""


@dataclass(slots=True)
class _Suspect:
    boots: set[str]
    until_s: float


class Quarantine:
    """Digests of bodies whose worker was lost before it gave any byte of an answer."""

    def __init__(self) -> None:
        self._suspects: dict[bytes, _Suspect] = {}

    def __len__(self) -> int:
        return sum(len(suspect.boots) >= LOSSES for suspect in self._suspects.values())

    def holds(self, body: bytes, now_s: float) -> bool:
        """Say whether this body must not be sent. Costs nothing while nobody is suspected."""
        if not self._suspects:
            return False
        digest = _digest(body)
        suspect = self._suspects.get(digest)
        if suspect is None:
            return False
        if now_s >= suspect.until_s:
            del self._suspects[digest]
            return False
        return len(suspect.boots) >= LOSSES

    def lost(self, body: bytes, boot: str, now_s: float) -> None:
        """Take note that this life of a worker ended, or seemed to, while it had this body."""
        digest = _digest(body)
        suspect = self._suspects.pop(digest, None)
        if suspect is None or now_s >= suspect.until_s:
            suspect = _Suspect(set(), 0.0)
        suspect.boots.add(boot)
        suspect.until_s = now_s + KEPT_S
        self._suspects[digest] = suspect
        if len(self._suspects) > _BODIES:
            del self._suspects[next(iter(self._suspects))]

    def answered(self, body: bytes) -> None:
        """Take note that a worker survived this body: it was near a death, not the cause."""
        if self._suspects:
            self._suspects.pop(_digest(body), None)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
