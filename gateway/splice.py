"""Join a worker's stream to its client's: what comes is read in passing and written at once."""

from __future__ import annotations

from collections.abc import Callable

from gateway.http.downstream import Reply
from gateway.http.upstream import Answer
from gateway.protocols.event_stream import Scanner, is_telling
from gateway.proxy.context import Trip
from gateway.types import Headers

# What may follow the last event is the end of the stream; who does not end it is not waited for.
_AFTER_DONE_S = 1.0


class Splice:
    """One stream on its way. No task runs for an event: the connections hand it to each other."""

    def __init__(
        self,
        answer: Answer,
        reply: Reply,
        trip: Trip,
        scanner: Scanner,
        *,
        idle_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._answer = answer
        self._reply = reply
        self._trip = trip
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._begun = False
        self._scanner = scanner
        self._send: Callable[[bytes], None] | None = None
        self.reading = scanner.reading

    async def run(self, headers: Headers) -> bytes:
        """Pass events on up to the end, or to the first that must not be passed on.

        Return what may be passed on with the end; raise `LinkLost`.
        """
        await self._reply.open(headers, self._answer.press)
        last = await self._answer.pour(self._pass_on, self._pass_through)
        return self._read(last) + self._scanner.close()

    def _pass_on(self, piece: bytes) -> bool:
        """Pass on what may be of a piece; say whether more is wanted."""
        reading = self.reading
        if passed := self._read(piece):
            self._reply.part(passed)
        if reading.done:
            self._answer.limit_silence(_AFTER_DONE_S)
        elif not self._begun:
            self._begun = True
            self._answer.limit_silence(self._idle_timeout_s)
        self._send = self._reply.sends_chunks() if self._scanner.quiet else None
        return not reading.broken

    def _pass_through(self, chunk: bytes) -> bool:
        """Pass on an HTTP chunk as it came, if there is nothing in it to be learnt or hidden.

        Nearly every word of a stream takes this way, and nothing on it changes what is looked at.
        """
        if self._send is None or not chunk.endswith(b"\n\n\r\n") or is_telling(chunk):
            return False
        self._send(chunk)
        return True

    def _read(self, piece: bytes) -> bytes:
        passed = self._scanner.feed(piece)
        if self._trip.first_token_s is None and self.reading.content_seen:
            self._trip.first_token_s = self._clock()
        return passed
