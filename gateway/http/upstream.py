"""One connection to a worker: a POST goes out, its answer comes in.

The HTTP is parsed by httptools, as on the client's side. A general client would bring redirects,
cookies, compression and pools for the whole internet, and cost more than all else that a request
needs here; a relay asks known machines one kind of question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from gateway.silence import Silence
from gateway.worker_answer import Answer, LinkLost, LinkSilent, Sink, Through

HEAD_LIMIT_BYTES = 64 * 1024
# What may wait here for a client that reads slowly, before the worker is made to wait.
_HELD_LIMIT_BYTES = 64 * 1024
_CONTINUE, _SWITCHING, _OK = 100, 101, 200


def _beginnings(limit_bytes: int) -> list[tuple[bytes, ...]]:
    """List how a chunk of so many bytes in all begins: with its size, in small or large letters."""
    found: list[tuple[bytes, ...]] = [()] * limit_bytes  # () begins nothing
    for size in range(1, limit_bytes):
        begin = b"%x\r\n" % size
        if (whole := len(begin) + size + 2) < limit_bytes:
            found[whole] = (begin,) if begin == begin.upper() else (begin, begin.upper())
    return found


# The parser reads what is longer; the words of a stream are not.
_BEGINNINGS = _beginnings(4096)


class Link(asyncio.Protocol):
    """A connection that carries one request at a time. `on_free` is called when it may be kept."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_free: Callable[[Link], None]) -> None:
        self._loop = loop
        self._on_free = on_free
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._error: LinkLost | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._through: Through | None = None
        self._silence = Silence(loop, lambda: self._fail(LinkSilent("nothing came in time")))
        self._busy = False
        self._begin_answer()
        self.used = False
        """It has carried a request before."""
        self.heard: bool
        """Something came since the last request was sent."""

    def _begin_answer(self) -> None:
        self._answer = Answer(self)
        self._parts: list[bytes] = []
        self._head_bytes = 0
        self._headed = self._framed = self._complete = self._kept_alive = self._paused = False
        self._in_chunk = True
        self._between_chunks = False
        self.heard = False

    @property
    def open(self) -> bool:
        """Say whether it can carry a request."""
        return self._error is None and not self._busy

    async def ask(self, request: bytes, body: bytes, silence_s: float) -> Answer:
        """Send a request and return its answer once the head is there; raise `LinkLost`."""
        self._begin_answer()
        self._busy = True
        self._silence.limit(silence_s)
        self._transport.writelines((request, body))
        while not self._headed:
            await self._more()
        return self._answer

    async def take(self) -> bytes:
        """Return the bytes of the answer's body that came, when there are some, or it ended."""
        while not self._parts and not self._complete:
            await self._more()
        self.press(False)
        return self._gathered()

    async def pour(self, sink: Sink, through: Through | None) -> bytes:
        """Hand what comes to a sink, and return what came with the end."""
        self._sink, self._through = sink, through
        try:
            self.press(False)
            self._deliver()
            while self._sink is not None and not self._complete:
                await self._more()
        finally:
            self._sink = self._through = None
        return self._gathered()

    def press(self, pressed: bool) -> None:
        """Read nothing for a while, or go on; what is not read is no silence."""
        if pressed is self._paused or self._error is not None:
            return
        self._paused = pressed
        if pressed:
            self._silence.stop_listening()
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
            if self._waiter is not None:
                self._silence.listen()

    def limit_silence(self, seconds: float) -> None:
        """Bound each wait."""
        self._silence.limit(seconds)

    def release(self) -> None:
        """Keep the connection if its answer came to an end that allows it, else close it."""
        self._busy = False
        unsent = self._transport.get_write_buffer_size()
        if self._complete and self._kept_alive and self._error is None and not unsent:
            self.press(False)  # the end may have come with more than its reader could take
            self.used = True
            self._on_free(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._fail(LinkLost("closed here"))
        self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it

    def data_received(self, data: bytes) -> None:
        """Parse, and hand on what came."""
        if not self._busy:
            self.abort()  # nobody asked
            return
        # Nearly every word of a stream comes so. The parser would be behind such a chunk as it was
        # before it, so it need not see it.
        through = self._through
        if (
            through is not None
            and self._between_chunks
            and (size := len(data)) < len(_BEGINNINGS)
            and data.startswith(_BEGINNINGS[size])
            and data.endswith(b"\r\n")
        ):
            self._silence.listen()  # before it: it may press, and then nobody listens
            if through(data):
                return
        self.heard = True
        if not self._headed:
            self._head_bytes += len(data)
        wrong = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            wrong = f"no HTTP: {error!r:.200}"
        self._between_chunks = not self._in_chunk and data.endswith(b"\r\n")
        if not self._headed and self._head_bytes > HEAD_LIMIT_BYTES:
            wrong = "the head of the answer is too long"
        self._deliver()
        if wrong is not None:
            self._fail(LinkLost(wrong))
            self._transport.abort()

    def eof_received(self) -> None:
        """Let the transport close: a worker that has ended its side has nothing more to say."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer: well only where its end is the connection's."""
        if self._busy and self._headed and not self._framed and exc is None:
            self._complete = True  # HTTP/1.0: the end of the connection ends the answer
        why = f"the connection broke: {exc!r}" if exc else "the worker closed the connection"
        self._fail(LinkLost(why, exc.errno if isinstance(exc, OSError) else None))

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Let nothing follow an answer: it would be taken for that of the next request."""
        if self._complete:
            raise LinkLost("more came than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the few headers that matter here; none is passed on."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"retry-after":
            self._answer.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Let the asker have the answer, unless it is still to come."""
        self._answer.status = self._parser.get_status_code()
        if self._answer.status >= _OK:
            self._headed = True
            self._kept_alive = self._parser.should_keep_alive()
        elif self._answer.status == _SWITCHING:
            raise LinkLost("the worker wants another protocol")

    def on_chunk_header(self) -> None:
        """Note that the next bytes are a chunk's, or what follows the last one."""
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        """Note that the next bytes are the size of a chunk."""
        self._in_chunk = False

    def on_body(self, body: bytes) -> None:
        """Hold a part of the body until all that came with it is parsed."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        self._complete = self._headed
        self._in_chunk = True
        self._framed &= self._headed  # "100 Continue" and its like: the answer is still to come

    def _deliver(self) -> None:
        """Hand what came to the sink, else wake who waits; let the worker wait for who does not.

        What came with the end is for who waits too: with it there is an answer to be ended.
        """
        if self._sink is None or self._complete:
            self._wake()
            if sum(map(len, self._parts)) > _HELD_LIMIT_BYTES and not self._complete:
                self.press(True)
        elif self._parts:
            self._silence.listen()
            if not self._sink(self._gathered()):
                self._sink = self._through = None
                self._wake()

    def _gathered(self) -> bytes:
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _more(self) -> None:
        """Wait until something new came; raise what ended the connection."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        if not self._paused:
            self._silence.listen()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._silence.stop_listening()
        if self._error is not None and not self._parts and not self._complete:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: LinkLost) -> None:
        self._error = self._error or error
        self._silence.end()
        self._wake()
