"""A worker's answer as it comes in, for whoever relays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.http.upstream import Link

Sink = Callable[[bytes], bool]
"""Takes what came, there and then; says whether more is wanted."""
Through = Callable[[bytes], bool]
"""Takes one HTTP chunk as it came, frame and all; says whether it did."""


class LinkLost(Exception):
    """The connection ended before the answer did, or what came is no HTTP."""

    def __init__(self, why: str, errno: int | None = None) -> None:
        super().__init__(why)
        self.errno = errno


class LinkSilent(LinkLost):
    """Nothing came for as long as the asker was ready to wait."""


class Answer:
    """An answer as it comes in. Whoever got it closes it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.status = 0
        self.retry_after: str | None = None

    async def chunk(self) -> bytes:
        """Return what came since the last call, at least a byte; nothing at the end.

        Raise `LinkLost` where the end is missing, after all that came before it.
        """
        return await self._link.take()

    async def pour(self, sink: Sink, through: Through | None = None) -> bytes:
        """Hand each piece to a sink in the turn of the loop in which it comes, up to the end.

        What comes as one whole chunk is offered to `through` first. Return what came with the end
        itself. Raise `LinkLost` where the end is missing.
        """
        return await self._link.pour(sink, through)

    def press(self, pressed: bool) -> None:
        """Make the worker wait for as long as what it sends cannot be passed on."""
        self._link.press(pressed)

    async def read(self, limit_bytes: int | None = None) -> bytes:
        """Return the whole rest, or what came up to about a limit."""
        parts = []
        size = 0
        while (limit_bytes is None or size < limit_bytes) and (part := await self.chunk()):
            parts.append(part)
            size += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def limit_silence(self, seconds: float) -> None:
        """Bound each wait for something new from here on."""
        self._link.limit_silence(seconds)

    def close(self) -> None:
        """Free the connection: for the next request if this answer ended, else for good."""
        self._link.release()
