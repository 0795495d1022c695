"""`POST /v1/responses`: what a request goes on from, what is kept of it, and the background.

A response in the background is a request like any other, which writes to an `EventLog` in place of
its client's connection. Clients follow the log as often as they like.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple

from gateway import errors
from gateway.assembly import Gateway
from gateway.http.downstream import (
    PIECE_BYTES,
    CancelScope,
    ClientDisconnected,
    ResponseWriter,
    pieces,
)
from gateway.memory_budget import MemoryHold
from gateway.protocols.openai import CHAT, WireFormat
from gateway.protocols.responses import ResponsesFormat
from gateway.protocols.responses.request import Json, ResponsesRequest
from gateway.responses.kept_items import KeptItems, new_id
from gateway.types import Header

log = logging.getLogger(__name__)

_KEEPALIVE = b": keepalive\n\n"
FOLLOWER_BYTES = 3 * PIECE_BYTES
"""Of a piece of a log, of its chunk and of what the connection has not sent."""
_EVENT_BYTES = 64
"""Of an event beside its text."""
_JSON_HEADERS = ((b"content-type", b"application/json"),)
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class LogLimits(NamedTuple):
    """How much of the responses in the background a gateway holds."""

    log_bytes: int = 32 * 1024 * 1024
    """Of one response; a longer one fails."""
    ended: int = 256
    """Responses that have ended; the oldest is forgotten first."""
    ended_bytes: int = 128 * 1024 * 1024


class EventLog:
    """The events of a response in the background, which takes the place of a `ResponseWriter`.

    It holds every event, the last ones too; beyond its limit, or without memory, it cancels the
    request.
    """

    def __init__(
        self, request_id: str, keepalive_s: float, limit_bytes: int, hold: MemoryHold
    ) -> None:
        self.request_id = request_id
        self.hold = hold
        """Has the events, also after their end."""
        self._limit_bytes = limit_bytes
        self._keepalive_s = keepalive_s
        self.rate_limit_headers: Sequence[Header] = ()
        self.started = False
        self.opened_s = float("inf")
        self.early = False
        self.idle = False
        self.on_check: Callable[[float], None] | None = None
        self.writable = True
        self.events: list[bytes] = []
        """By their sequence numbers."""
        self.size_bytes = 0
        self.closed = False
        self.starved = False
        """There was no memory for its events."""
        self._cancel_scope: CancelScope | None = None
        self._changed = asyncio.Event()
        self._followers = 0
        self._forgotten = False

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """Yield the events after this number, those to come too, until the response ends.

        Yield no more than a piece at a time, and a comment where no event comes for a while.
        """
        place = after + 1
        self._followers += 1
        try:
            while True:
                changed = self._changed
                if pending := self._events_from(place):
                    place += len(pending)
                    for piece in pieces(b"".join(pending)):
                        yield piece
                elif self.closed:
                    return
                else:
                    try:
                        async with asyncio.timeout(self._keepalive_s):
                            await changed.wait()
                    except TimeoutError:
                        yield _KEEPALIVE
        finally:
            self._followers -= 1
            self._release()

    def forget(self) -> None:
        """Give back the memory of the events, once nobody follows them."""
        self._forgotten = True
        self._release()

    def _release(self) -> None:
        if self._forgotten and not self._followers:
            self.hold.release()

    def close(self) -> None:
        """End the log: no event comes any more."""
        self.closed = True
        self._tell()

    # What a `ResponseWriter` does.

    async def whole(
        self,
        status: int,
        headers: Iterable[Header],
        body: bytes,
    ) -> None:
        """Take a whole answer, which no client gets."""

    async def open(
        self,
        headers: Iterable[Header],  # noqa: ARG002
        on_write_paused: Callable[[bool], None],  # noqa: ARG002
    ) -> None:
        """Begin the stream."""
        self.started = True

    def open_early(self, headers: Iterable[Header], piece: bytes) -> None:
        """Take a comment, which no follower needs."""

    def send_head(self) -> None:
        """Send nothing: a log has no head."""

    def add_headers(self, headers: Iterable[Header]) -> None:
        """Take headers, which no client gets."""

    def write(self, piece: bytes) -> None:
        """Append events, and cancel the request beyond the limit; comments are left out."""
        if not self._append(piece):
            self.starved = True
            self.cancel(errors.Overloaded())
        if self.size_bytes > self._limit_bytes:
            self.cancel(errors.ResponseTooLarge(self._limit_bytes))

    def chunk_sender(self) -> None:
        """Return nothing: an HTTP chunk is no event."""

    def end(self, piece: bytes = b"") -> None:
        """Append the last events."""
        self._append(piece)

    async def fail(
        self,
        error: errors.GatewayError,
        headers: Iterable[Header] = (),  # noqa: ARG002
        wire_format: WireFormat = CHAT,
    ) -> None:
        """Append the events of an error."""
        self._append(wire_format.error_event(error))

    def attach(self, cancel_scope: CancelScope | None) -> None:
        """Check the deadline of this scope, and cancel it on `cancel`."""
        self._cancel_scope = cancel_scope

    def cancel(self, cause: Exception) -> None:
        """Cancel the request, which ends with this cause."""
        if self._cancel_scope is not None:
            self._cancel_scope.cancel(cause)

    def check(self, now_s: float) -> None:
        """Cancel the request if its deadline has passed."""
        if self._cancel_scope is not None:
            self._cancel_scope.check(now_s)

    def _events_from(self, place: int) -> list[bytes]:
        """Return the next events, no more than a piece of a stream holds, and one at least."""
        end, room = place, PIECE_BYTES
        while end < len(self.events) and (end == place or len(self.events[end]) <= room):
            room -= len(self.events[end])
            end += 1
        return self.events[place:end]

    def _append(self, piece: bytes) -> bool:
        """Append events; return whether there was memory for them."""
        if not piece.startswith(b"event:"):
            return True
        self.size_bytes += len(piece)
        had_room = self.hold.count(len(piece) + _EVENT_BYTES * piece.count(b"\n\n"))
        self.events += [one + b"\n\n" for one in piece.split(b"\n\n")[:-1]]
        self._tell()
        return had_room

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


AnswerWriter = ResponseWriter | EventLog
"""What an answer is written to: the connection of its client, or a log."""


class ResponseExchange:
    """One request for a response: what stands before it, and what is kept of it."""

    def __init__(self, service: ResponsesService, wire_format: ResponsesFormat) -> None:
        self.format = wire_format
        self.owner = ""
        self.log: EventLog | None = None
        """Of a response in the background."""
        self._service = service
        self._kept: KeptItems | None = None
        self._after: Json = {}
        self._viewer: asyncio.Task[None] | None = None
        self._cancelled = False

    @property
    def request(self) -> ResponsesRequest:
        """Return the request, which has been read."""
        assert self.format.request is not None, "the request has not been read"
        return self.format.request

    @property
    def response(self) -> Json:
        """Return the response as it is now."""
        return self.format.builder.response

    async def open(self, body: Json, owner: str, hold: MemoryHold, size_bytes: int) -> None:
        """Read a parsed body of this size and what it goes on from; raise a `RequestRefused`.

        `hold` gets the bytes of what it goes on from.
        """
        self.owner = owner
        self._hold = hold
        request = self.format.read(body)
        self._kept = kept = self._service.kept(hold, size_bytes)
        self.format.history, self._after = await kept.open(owner, request)
        self.format.request = request._replace(items=await kept.resolve(owner, request.items))

    async def detach(self, writer: ResponseWriter, cancel_scope: CancelScope) -> EventLog:
        """Answer a request for the background; return what the response is written to.

        From here on the client's connection may end, and the response goes on.
        """
        builder = self.format.builder
        service = self._service
        self.log = event_log = EventLog(
            writer.request_id, service.keepalive_s, service.limits.log_bytes, self._hold.another()
        )
        wants_stream = bool(self.request.body.get("stream"))
        service.add(self)
        writer.attach(None)
        event_log.attach(cancel_scope)
        builder.response["status"] = "queued"
        queued = self.format.body()
        await self._keep({**self.response, "status": "in_progress"})
        event_log.write(self.format.begin_events())
        if wants_stream:
            viewing = _view(writer, event_log)
            self._viewer = asyncio.create_task(viewing, name=f"view {builder.response['id']}")
        else:
            await writer.whole(200, _JSON_HEADERS, queued)
        return event_log

    async def finish(self) -> bytes:
        """Keep the response that is complete now; return the last bytes for the client."""
        if self.request.store:
            self.response["store"] = await self._keep(self.response)
        streams = self.request.background or bool(self.request.body.get("stream"))
        return self.format.final_event() if streams else self.format.body()

    async def cancel(self) -> None:
        """Cancel a response in the background, and wait until it has ended."""
        self._cancelled = True
        if self.log is not None:
            self.log.cancel(ClientDisconnected())
            async for _ in self.log.follow(len(self.log.events)):
                pass

    async def end(self) -> None:
        """Drop the request, and end a response in the background, however its request ended."""
        try:
            if self.log is not None:
                await self._end_log(self.log)
        finally:
            self._kept = None  # its `hold` leads back here: a cycle of garbage with all bodies
            self.format.drop()

    async def _end_log(self, event_log: EventLog) -> None:
        builder = self.format.builder
        try:
            if self._cancelled and not builder.ended:
                builder.cancel()
            elif not builder.ended:
                await event_log.fail(errors.Interrupted(), (), self.format)
            if event_log.starved:  # else no memory may be left to keep how it ended
                self._service.forget(self)
                builder.response["output"].clear()
                self._hold.release()
            if builder.response["status"] in ("failed", "cancelled"):
                await self._keep(self.response)
        finally:
            event_log.attach(None)
            event_log.close()
            self._service.ended(self)
            self._after = {}
            self.format.drop()
        if self._viewer is not None:
            await asyncio.wait((self._viewer,), timeout=self._service.view_timeout_s)
            self._viewer.cancel()

    async def _keep(self, response: Json) -> bool:
        output = self.format.builder.kept_output()
        try:
            assert self._kept is not None, "the request has not been read"
            kept = await self._kept.keep_response(
                self.owner, response, self.request, output, self._after
            )
        except (errors.RecordsUnwritable, errors.Overloaded):
            kept = False
        if not kept:
            log.warning("response.not_kept response=%s", response["id"])
        return kept


class ResponsesService:
    """Serves `POST /v1/responses`, and knows the responses that run in the background."""

    def __init__(self, gateway: Gateway, limits: LogLimits = LogLimits()) -> None:  # noqa: B008
        self._gateway = gateway
        self.limits = limits
        self.memory = gateway.memory
        self.view_timeout_s = gateway.settings.idle_timeout_s
        self.keepalive_s = gateway.settings.keepalive_s
        self._exchanges: OrderedDict[str, ResponseExchange] = OrderedDict()
        """Those in the background by the id of the response, and the last ones that have ended."""

    def kept(self, hold: MemoryHold, size_bytes: int = 0) -> KeptItems:
        """Return what is kept, for one request."""
        gateway = self._gateway
        return KeptItems(
            gateway.expiring_records, gateway.wall, gateway.inspection_thread, hold, size_bytes
        )

    def exchange(self) -> ResponseExchange:
        """Return the exchange of a new request."""
        gateway = self._gateway
        wire_format = ResponsesFormat(new_id("resp"), gateway.sealer, gateway.wall)
        return ResponseExchange(self, wire_format)

    def add(self, exchange: ResponseExchange) -> None:
        """Add a response that runs in the background."""
        self._exchanges[exchange.response["id"]] = exchange

    def ended(self, exchange: ResponseExchange) -> None:
        """Forget the oldest of those that have ended, beyond the limits."""
        if exchange.response["id"] in self._exchanges:
            self._exchanges.move_to_end(exchange.response["id"])
        over = [one for one in self._exchanges.values() if one.log and one.log.closed]
        size = sum(one.log.size_bytes for one in over if one.log)
        while over and (size > self.limits.ended_bytes or len(over) > self.limits.ended):
            first = over.pop(0)
            size -= first.log.size_bytes if first.log else 0
            self.forget(first)

    def forget(self, exchange: ResponseExchange) -> None:
        """Forget a response that has ended."""
        if self._exchanges.pop(exchange.response["id"], None) and exchange.log is not None:
            exchange.log.forget()

    def background(self, owner: str, name: str) -> ResponseExchange | None:
        """Return a response in the background of this gateway, if it belongs to the owner."""
        exchange = self._exchanges.get(name)
        return exchange if exchange is not None and exchange.owner == owner else None

    async def check(self) -> None:
        """Check the deadlines of the responses in the background."""
        now_s = asyncio.get_running_loop().time()
        for exchange in tuple(self._exchanges.values()):
            if exchange.log is not None and not exchange.log.closed:
                exchange.log.check(now_s)


async def _view(writer: ResponseWriter, event_log: EventLog) -> None:
    """Stream a log to the client that began it."""
    await writer.open(EVENT_HEADERS, lambda _paused: None)
    async for piece in event_log.follow():
        await writer.drained()
        writer.write(piece)
    writer.end()
