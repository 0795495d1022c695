"""One connection of a client: bounds on time and size that uvicorn leaves open, and fewer packets.

uvicorn bounds neither the time nor the size of a head, nor the time for which a reader may stall.
What is kept here for a connection is a few numbers; one task looks at all of them each second, so
that no request pays for a timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import (
    GatewayError,
    HeadTooLarge,
    HeadTooSlow,
    NotHttp,
    RequestRefused,
    to_body,
    to_headers,
)
from gateway.exchange import EXCHANGE, Exchange

HEAD_LIMIT_BYTES = 32 * 1024
"""As much as nginx takes."""
HEADERS_LIMIT = 100
# How long the rest of a request that was refused is read and dropped. Closing at once would send a
# reset, and that destroys the refusal before the client can read it.
_LINGER_S = 2.0
_SWEEP_S = 1.0
_UPGRADING = frozenset((b"connection", b"upgrade", b"http2-settings"))


class ClientLink(HttpToolsProtocol):
    """HTTP/1.1 with a client. `head_timeout_s` and `write_timeout_s` as in the settings."""

    def __init__(self, *, head_timeout_s: float, write_timeout_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._head_since_s: float | None = None
        self._head_bytes = 0
        self._receiving = False
        self._refusal: RequestRefused | None = None
        self._unsent_bytes = 0
        self._sent_at_s = 0.0
        self._outlet: _Outlet
        self._exchange: Exchange | None = None
        """Of the request that is being answered, or was last."""
        # Not the exchange itself: each request would be a cycle of garbage.
        self._extensions: dict[str, dict[object, object]]
        self._extensions = {EXCHANGE: {"running": lambda: self._exchange}}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        self._head_since_s = self.loop.time()
        self._outlet = _Outlet(transport, self.loop, unread=lambda: self._receiving)
        super().connection_made(self._outlet)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that runs."""
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.leave()

    def pause_writing(self) -> None:
        """Tell the request that runs, and make those behind it wait."""
        super().pause_writing()
        if self._exchange is not None:
            self._exchange.press(True)

    def resume_writing(self) -> None:
        """Let what was made to wait go on."""
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.press(False)

    def data_received(self, data: bytes) -> None:
        """Parse; refuse a head that grows without an end."""
        if not self._receiving:
            self._receiving = True
            self._head_bytes = 0
            if self._head_since_s is None:
                self._head_since_s = self.loop.time()
        if self._outlet.closing_since_s is not None and self.cycle is None:
            return  # refused before there was a request; what still comes is dropped
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._head_since_s is not None and self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse(HeadTooLarge(HEAD_LIMIT_BYTES, HEADERS_LIMIT))

    def on_message_begin(self) -> None:
        """Give each head its time, also one that came right behind the request before."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        if self._head_since_s is None:
            self._receiving, self._head_bytes = True, 0
            self._head_since_s = self.loop.time()

    def on_headers_complete(self) -> None:
        """Hand the request to the application, unless its head is too large."""
        self._head_since_s = None
        size = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
        if size > HEAD_LIMIT_BYTES or len(self.headers) > HEADERS_LIMIT:
            self._refusal = HeadTooLarge(HEAD_LIMIT_BYTES, HEADERS_LIMIT)
            raise self._refusal
        if self.parser.should_upgrade():
            return  # `_feed` goes on without it
        if self._outlet.closing_since_s is None:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that nothing of this request is left to be read."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._receiving = False
        self._outlet.finish_closing()

    def check(self, now_s: float) -> None:
        """End the connection where the client has taken too long: to ask, to read, or to go."""
        closing_since_s = self._outlet.closing_since_s
        unsent_bytes = self._outlet.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._sent_at_s = unsent_bytes, now_s
            if closing_since_s is not None and now_s - closing_since_s > _LINGER_S:
                self._outlet.finish_closing()
        elif now_s - self._sent_at_s > self._write_timeout_s:
            self._outlet.abort()
        if self._head_since_s is not None and self.cycle and not self.cycle.response_complete:
            self._head_since_s = now_s  # the next head has its time once this answer has ended
        waited_s = now_s - (now_s if self._head_since_s is None else self._head_since_s)
        if waited_s > self._head_timeout_s and closing_since_s is None:
            if self._head_bytes:
                self._refuse(HeadTooSlow())
            else:
                self._outlet.abort()
        if self._exchange is not None:
            self._exchange.check(now_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Give a request whose turn has come its way back to the client."""
        self._exchange = Exchange(cycle, self._outlet.write_at_once)
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Parse; serve a request that asks for another protocol without that, as HTTP allows.

        Java's own client asks so on every first request, and the parser stops there.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method = self.parser.get_method()
            if method == b"CONNECT":
                self._refuse(NotHttp())
                return
            kept = [pair for pair in self.headers if pair[0] not in _UPGRADING]
            head = [b"%s %s HTTP/1.1" % (method, self.url), *(b"%s: %s" % pair for pair in kept)]
            self.parser = httptools.HttpRequestParser(self)
            self._feed(b"\r\n".join((*head, b"", data[upgrade.args[0] :])))
        except httptools.HttpParserError:
            self._refuse(self._refusal or NotHttp())

    def _refuse(self, error: GatewayError) -> None:
        """Answer in place of the application, and read no further request."""
        self._head_since_s = None
        busy = self.cycle is not None and not self.cycle.response_complete
        if self._outlet.is_closing() or busy:
            self._outlet.abort()  # in the middle of an answer there is no place for another
            return
        body = to_body(error)
        head = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
        head += [b"%s: %s" % pair for pair in to_headers(error)]
        head += [b"content-length: %d" % len(body), b"connection: close", b"", body]
        self._outlet.write(b"\r\n".join(head))
        self._outlet.close()


async def sweep(connections: Iterable[Any]) -> None:
    """Check the connections of a live set once a second, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_SWEEP_S)
        now_s = loop.time()
        for connection in tuple(connections):
            connection.check(now_s)


class _Outlet(asyncio.Transport):
    """A transport that sends what is written in one turn of the loop as one packet.

    uvicorn writes a head and its body one by one, and system calls are most of what a server costs.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        unread: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._unread = unread
        self._held: list[bytes] = []
        self.closing_since_s: float | None = None
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.set_protocol = transport.set_protocol  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self.closing_since_s is not None:
            return
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(bytes(data))

    def write_at_once(self, data: bytes) -> None:
        """Send what is whole by itself, behind what is held."""
        if self._held:
            self.write(data)
            self._send()
        elif self.closing_since_s is None and not self._transport.is_closing():
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self.closing_since_s is not None or self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close once all is sent and, within bounds, the rest of the request has been read."""
        if self.closing_since_s is not None:
            return
        self.closing_since_s = self._loop.time()
        self._send()
        if self._unread() and not self._transport.is_closing():
            self._transport.resume_reading()
            self._transport.write_eof()
        else:
            self._transport.close()

    def finish_closing(self) -> None:
        """Wait no longer for the rest of the request."""
        if self.closing_since_s is not None:
            self._transport.close()

    def abort(self) -> None:
        self._held.clear()
        self._transport.abort()

    def _send(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():  # else the client left in this very turn
            self._transport.writelines(held)
