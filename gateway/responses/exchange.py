"""`POST /v1/responses`: continued and stored responses, and responses in the background.

A response in the background is a request like any other, whose events go to an `EventLog` in place
of its client's connection. Clients follow the log as often as they like.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from gateway import errors
from gateway.assembly import Gateway
from gateway.http.downstream import (
    JSON_HEADERS,
    KEEPALIVE,
    PIECE_BYTES,
    STREAM_HEADERS,
    CancelScope,
    ClientDisconnected,
    EventWriter,
    ResponseWriter,
    pieces,
)
from gateway.memory_budget import MemoryHold
from gateway.protocols.base import encode_event, encode_events
from gateway.protocols.responses import DONE, ResponsesFormat
from gateway.protocols.responses.request import ResponsesRequest
from gateway.responses.kept_items import KeptItems, new_id
from gateway.state.expiring import TTL_S
from gateway.types import Json

log = logging.getLogger(__name__)
FOLLOWER_BYTES = 3 * PIECE_BYTES
"""Of a piece of a log, of its chunk and of bytes that the connection has not sent."""
LOG_LIMIT_BYTES = 32 * 1024 * 1024
"""Of the events of one response in the background; a longer one fails."""
ENDED_LIMIT = 256
"""Responses in the background that have ended; the oldest is forgotten first, or at its time."""
ENDED_LIMIT_BYTES = 128 * 1024 * 1024
_EVENT_BYTES = 64
"""Of an event beside its text."""


@dataclass(slots=True, eq=False)
class EventLog:
    """The events of a response in the background, as its `EventWriter` sends them.

    It holds every event, the last ones too. `cancel` ends the request beyond the limit of the log,
    or without memory; None: the rest counts whatever its size.
    """

    _keepalive_s: float
    hold: MemoryHold
    """Has the events, also after their end."""
    cancel: Callable[[Exception], None] | None
    events: list[bytes] = field(default_factory=list)
    """By their sequence numbers."""
    size_bytes: int = 0
    closed: bool = False
    starved: bool = False
    """There was no memory for its events."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _followers: int = 0
    _forgotten: bool = False

    def append(self, piece: bytes) -> None:
        """Append events; comments are left out, and the end, which follows all of them."""
        if not piece.startswith(b"event:"):
            return
        piece = piece.removesuffix(DONE)
        self.size_bytes += len(piece)
        had_room = self.hold.count(len(piece) + _EVENT_BYTES * piece.count(b"\n\n"))
        self.events += [one + b"\n\n" for one in piece.split(b"\n\n")[:-1]]
        self._wake()
        if self.cancel is None:
            return
        if not had_room:
            self.starved = True
            self.cancel(errors.Overloaded())
        if self.size_bytes > LOG_LIMIT_BYTES:
            self.cancel(errors.ResponseTooLarge(LOG_LIMIT_BYTES))

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
                    yield DONE
                    return
                else:
                    try:
                        async with asyncio.timeout(self._keepalive_s):
                            await changed.wait()
                    except TimeoutError:
                        yield KEEPALIVE
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
        self.closed, self.cancel = True, None
        self._wake()

    def _events_from(self, place: int) -> list[bytes]:
        """Return the next events, no more than a piece of a stream holds, and one at least."""
        end, room = place, PIECE_BYTES
        while end < len(self.events) and (end == place or len(self.events[end]) <= room):
            room -= len(self.events[end])
            end += 1
        return self.events[place:end]

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class ResponseExchange(ResponsesFormat):
    """One request for a response: the items before it, and the items to store."""

    finishes = True

    def __init__(self, service: "ResponsesService") -> None:
        gateway = service.gateway
        super().__init__(new_id("resp"), gateway.sealer, gateway.wall)
        self._settings = gateway.settings
        self.owner = ""
        self.log: EventLog | None = None
        """Of a response in the background."""
        self.ended_s = 0.0
        """When that has ended."""
        self._service = service
        self._kept: KeptItems | None = None
        self._after: Json = {}
        self._cancel_scope: CancelScope | None = None
        self._viewer: asyncio.Task[None] | None = None
        self._cancelled = False

    @property
    def asked(self) -> ResponsesRequest:
        """Return the request, which has been read."""
        assert self.request is not None, "the request has not been read"
        return self.request

    async def open(self, body: Json, owner: str, hold: MemoryHold, size_bytes: int) -> int:
        """Read a parsed body of this size and its history; return the size of both.

        `hold` gets the bytes of the history. Raise a `RequestRefused`.
        """
        self.owner = owner
        self._hold = hold
        request = self.read(body)
        self._kept = kept = self._service.kept(hold, size_bytes)
        self.history, self._after = await kept.open(owner, request)
        self.request = request._replace(
            items=await kept.resolve(owner, request.items, self.history)
        )
        return kept.size_bytes

    async def writer(self, client: ResponseWriter, cancel_scope: CancelScope) -> EventWriter:
        """Return the writer of the response; answer a request for the background.

        From then on its client's connection may end, and the response continues.
        """
        if not self.asked.background:
            return client
        response = self.builder.response
        self.log = event_log = EventLog(
            self._service.gateway.timing.keepalive_s, self._hold.another(), cancel_scope.cancel
        )
        self._service.add(self)
        client.attach(None)
        self._cancel_scope = cancel_scope
        response["status"] = "queued"
        queued = self.body()
        await self._keep({**response, "status": "in_progress"})
        event_log.append(encode_events(self.builder.begin(queued=True)))
        if self.asked.body.get("stream"):
            viewing = _view(client, event_log)
            self._viewer = asyncio.create_task(viewing, name=f"view {response['id']}")
        else:
            await client.whole(200, JSON_HEADERS, queued)
        return EventWriter(client.request_id, event_log.append)

    async def finish(self) -> bytes:
        """Keep the response that is complete now; return the last bytes for the client."""
        if self.asked.store:
            self.builder.response["store"] = await self._keep(self.builder.response)
        if self.log is not None:
            self.log.cancel = None
        streams = self.log is not None or self.asked.body.get("stream")
        return encode_event(self.builder.final()) + DONE if streams else self.body()

    async def cancel(self) -> None:
        """Cancel a response in the background, and wait until it has ended."""
        self._cancelled = True
        if self._cancel_scope is not None and self.log is not None:
            self._cancel_scope.cancel(ClientDisconnected())
            async for _ in self.log.follow(len(self.log.events)):
                pass

    def check(self, now_s: float) -> None:
        """Cancel a response in the background whose deadline has passed."""
        if self._cancel_scope is not None:
            self._cancel_scope.check(now_s)

    async def close(self) -> None:
        """Drop the request, and end a response in the background, however its request ended."""
        try:
            if self.log is not None:
                await self._end_log(self.log)
        finally:
            self.drop()

    def drop(self) -> None:
        """Drop the request, its answer, and the continued items: they lead back to this."""
        super().drop()
        self._kept, self._after = None, {}

    async def _end_log(self, event_log: EventLog) -> None:
        builder = self.builder
        try:
            if self._cancelled and not builder.ended:
                builder.cancel()
            elif not builder.ended:
                event_log.append(self.error_event(errors.Interrupted()))
            if event_log.starved:  # else no memory may be left to keep how it ended
                self._service.forget(self)
                builder.response["output"].clear()
                self._hold.release()
            if builder.response["status"] in ("failed", "cancelled"):
                await self._keep(builder.response)
        finally:
            self._cancel_scope = None
            event_log.close()
            self._service.ended(self)
            self.drop()
        if self._viewer is not None:
            await asyncio.wait((self._viewer,), timeout=self._settings.idle_timeout_s)
            self._viewer.cancel()

    async def _keep(self, response: Json) -> bool:
        assert self._kept is not None, "the request has not been read"
        output = self.builder.kept_output()
        try:
            kept = await self._kept.keep_response(
                self.owner, response, self.asked, output, self._after
            )
        except (errors.RecordsUnwritable, errors.Overloaded):
            kept = False
        if not kept:
            log.warning("response.not_kept response=%s", response["id"])
        return kept


class ResponsesService:
    """Serves `POST /v1/responses`, and knows the responses that run in the background."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._exchanges: OrderedDict[str, ResponseExchange] = OrderedDict()
        """Background responses by id, and the last ones that have ended."""

    def kept(self, hold: MemoryHold, size_bytes: int = 0) -> KeptItems:
        """Return the stored items, for one request."""
        gateway = self.gateway
        return KeptItems(
            gateway.expiring_records, gateway.wall, gateway.inspection_thread, hold, size_bytes
        )

    def exchange(self) -> ResponseExchange:
        """Return the wire format of a new request."""
        return ResponseExchange(self)

    def add(self, exchange: ResponseExchange) -> None:
        """Add a response that runs in the background."""
        self._exchanges[exchange.response_id] = exchange

    def ended(self, exchange: ResponseExchange) -> None:
        """Forget the oldest ended ones, beyond the limits."""
        exchange.ended_s = self.gateway.clock()
        if exchange.response_id in self._exchanges:
            self._exchanges.move_to_end(exchange.response_id)
        over = [(one, one.log) for one in self._exchanges.values() if one.log and one.log.closed]
        size = sum(event_log.size_bytes for _, event_log in over)
        while over and (size > ENDED_LIMIT_BYTES or len(over) > ENDED_LIMIT):
            first, event_log = over.pop(0)
            size -= event_log.size_bytes
            self.forget(first)

    def forget(self, exchange: ResponseExchange) -> None:
        """Forget a response that has ended."""
        if self._exchanges.pop(exchange.response_id, None) and exchange.log is not None:
            exchange.log.forget()

    def background(self, owner: str, name: str) -> ResponseExchange | None:
        """Return a response in the background of this gateway, if it belongs to the owner."""
        exchange = self._exchanges.get(name)
        return exchange if exchange is not None and exchange.owner == owner else None

    async def check(self) -> None:
        """Check the deadlines of the responses in the background, and forget those of a day ago."""
        now_s, last_s = asyncio.get_running_loop().time(), self.gateway.clock() - TTL_S
        for exchange in tuple(self._exchanges.values()):
            exchange.check(now_s)
            if exchange.log is not None and exchange.log.closed and exchange.ended_s <= last_s:
                self.forget(exchange)


async def _view(writer: ResponseWriter, event_log: EventLog) -> None:
    """Stream a log to the client that began it."""
    await writer.open(STREAM_HEADERS, lambda _paused: None)
    async for piece in event_log.follow():
        await writer.drained()
        writer.write(piece)
    writer.end()
