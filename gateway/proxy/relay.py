"""The stream of a client: relay the events of a worker, and keep it alive without any.

A stream is relayed without a task of its own: the worker's connection passes each piece to the
client's in the same iteration of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from gateway import errors
from gateway.engines.base import Engine
from gateway.http import upstream
from gateway.http.downstream import STREAM_HEADERS, EventWriter, ResponseWriter
from gateway.protocols.event_stream import StreamScanner, comment_of
from gateway.proxy.context import RequestContext
from paceline.protocol import TOKENS_LINE

log = logging.getLogger(__name__)

# Of the lines of one stream; each token takes some 9 bytes.
_LINES_LIMIT_BYTES = 4 * 1024 * 1024
# The end of the stream follows the last event; a worker that does not end it is not waited for.
_AFTER_DONE_S = 1.0
# The status of an error in a stream, as an engine would have it, and that of the stream.
_REFUSED, _STREAMED = 400, 200
_LINE_BEGIN = b"\r\n" + TOKENS_LINE
_LINE_BEGINS_BEFORE = 12
_CHUNK_HEADS = [b"%x\r\n" % size for size in range(4096)]
# So long after a worker has begun, an error still has a status of its own, and the head still
# leaves in one packet with the first token.
_HEAD_DELAY_S = 0.25
# So long before an early head, or half of the interval, a request may still be refused in time.
_CHECK_LEAD_S = 2.0


@dataclass(slots=True, eq=False)
class StreamRelay:
    """Relays one stream of events from a worker to a client."""

    response: upstream.UpstreamConnection
    writer: EventWriter
    context: RequestContext
    scanner: StreamScanner
    backend: Engine
    idle_timeout_s: float
    clock: Callable[[], float]
    collects: bool
    """The encoder collects the answer, or the calls in it."""
    begun: bool = False
    last: bytes = b""
    """The client's bytes with the end of the stream."""
    send_chunk: Callable[[bytes], None] | None = None
    lines: bytearray | None = None
    """Gets the lines with tokens, which are cut off the events."""
    lines_bytes: int = 0
    """Of the lines, as the memory of the request counts them."""
    moved: bool = False
    """An admin drains the worker."""
    starved: bool = False
    """There is no memory for the rest."""

    async def run(self) -> None:
        """Relay the stream; raise a `GatewayError` unless it is complete."""
        context, scanner = self.context, self.scanner
        lost = await self._pour()
        complete = scanner.state.complete
        if not (complete or (context.progress is not None and context.progress.ended)):
            if self.last:
                self.writer.write(self.last)
            raise self._failure(lost)
        last = self.last if complete else self.last + scanner.encoder.done()
        self.writer.end(last + await context.wire_format.finish())

    async def _pour(self) -> upstream.ConnectionLost | None:
        """Relay the events as they come; return the error that ended the stream, if any."""
        context, writer, state = self.context, self.writer, self.scanner.state
        route_headers = context.route_headers()
        late_headers = route_headers if writer.started else []
        try:
            await writer.open([*STREAM_HEADERS, *route_headers], self.pause)
            if late_headers:
                writer.write(comment_of(late_headers))
            end = await self.response.pour(self.relay_data, self.relay_chunk)
            self.last = self.scan(end) + self.scanner.close()
        except upstream.ConnectionLost as error:
            return error
        finally:
            context.usage = state.usage or context.usage
            context.drafts = state.drafts or context.drafts
            context.relayed |= state.begun
            context.answered = state.complete and not context.wire_format.finishes
            if context.progress is not None:
                context.progress.finished |= state.finished
            log_calls(context)
        return None

    @property
    def resumable(self) -> bool:
        """Return whether another worker can go on with the stream."""
        progress = self.scanner.progress
        return progress is not None and progress.resumable and not self.scanner.state.done

    def move(self) -> None:
        """End the attempt, so that another worker goes on."""
        self.moved = True
        self.response.end(upstream.ConnectionLost("an admin drains the worker"))

    def bound_progress(self) -> None:
        """Forget the client's part of a stream that is too long to continue elsewhere."""
        progress = self.scanner.progress
        if progress is None:
            return
        more_bytes = len(progress.lines) - self.lines_bytes
        self.lines_bytes += more_bytes
        self.context.hold.count(more_bytes)
        if self.lines_bytes > _LINES_LIMIT_BYTES:
            progress.complete = False
            progress.lines.clear()

    def relay_data(self, piece: bytes) -> bool:
        """Relay a piece; return whether more is wanted."""
        state = self.scanner.state
        if encoded := self.scan(piece):
            self.writer.write(encoded)
        if state.done:
            self.response.set_read_timeout(_AFTER_DONE_S)
        elif not self.begun:
            self.begun = True
            self.response.set_read_timeout(self.idle_timeout_s)
        self.send_chunk = self.writer.chunk_sender() if self.scanner.quiet else None
        progress = self.scanner.progress
        self.lines = None if progress is None else progress.lines
        return not state.broken

    def relay_chunk(self, chunk: bytes) -> bool:
        """Relay an HTTP chunk unchanged, if it contains only text; return whether it did.

        Nearly every token takes this path, which changes no state.
        """
        send = self.send_chunk
        if send is None or not chunk.endswith(b"\n\n\r\n") or self.scanner.has_facts(chunk):
            return False
        lines = self.lines
        if lines is not None:
            begin = chunk.find(_LINE_BEGIN, 1, _LINE_BEGINS_BEFORE)
            end = chunk.find(b"\n", begin + len(_LINE_BEGIN)) + 1
            if begin < 0 or chunk.find(b"\n\n", end) != len(chunk) - 4:
                return False  # not one event with its line
            lines += chunk[begin + len(_LINE_BEGIN) : end]
            event = chunk[end:]
            chunk = _CHUNK_HEADS[len(event) - 2] + event
        self.writer.idle = False
        send(chunk)
        return True

    def pause(self, paused: bool) -> None:
        """Pause or resume reading the response, for a client that reads slowly."""
        self.context.read_slowly = True
        self.response.pause(paused)

    def scan(self, piece: bytes) -> bytes:
        """Scan a piece, and return the client's bytes."""
        had_room = not self.collects or self.context.hold.count(len(piece))
        encoded = self.scanner.feed(piece)
        if not had_room and not self.scanner.state.done:
            self.starved, self.scanner.state.broken = True, "there is no memory for the rest"
        if self.context.first_token_at_s is None and self.scanner.state.content_seen:
            self.context.first_token_at_s = self.clock()
        return encoded

    def _failure(self, lost: upstream.ConnectionLost | None) -> errors.GatewayError:
        """Return why the stream is not complete."""
        context = self.context
        if self.starved:
            return errors.Overloaded()
        if self.scanner.state.broken:
            return self._why_broken()
        if isinstance(lost, upstream.ReadTimeout):
            return errors.WorkerStalled() if context.relayed else errors.WorkerSilent()
        if lost is not None:
            log.warning("stream.cut request=%s error=%r", context.request_id, lost)
        return errors.WorkerMoved() if self.moved else errors.WorkerLost()

    def _why_broken(self) -> errors.GatewayError:
        """Return the error of a stream that must not continue."""
        state, backend = self.scanner.state, self.backend
        log.warning("stream.broken request=%s why=%s", self.context.request_id, state.broken)
        if state.unheld:
            return errors.FieldUnheld(state.unheld)
        if state.too_large:
            return errors.AnswerTooLarge()
        if state.error and (backend.tells_fault or not state.begun):
            # Some engines begin each stream with 200, and then refuse the request.
            status = _STREAMED if backend.tells_fault else _REFUSED
            return backend.refusal(status, state.error, self.context.checked.body)
        return errors.WorkerFailed()


def log_calls(context: RequestContext) -> None:
    """Log how many calls of an engine the client does not get."""
    if context.answer_form is not None and (count := context.answer_form.left_out):
        log.warning("calls.left_out request=%s count=%d", context.request_id, count)


class KeepAlive:
    """A context in which a stream sends its head in time, and comments in place of events.

    The head goes out when a worker has begun, or after one interval; then each interval without an
    event ends with a comment, so that no idle limit on the way to the client cuts a working answer.
    Some time before a head goes out early, `on_long_wait` may still find an error.
    The connection calls `check` about once a second: a timer for each request costs more.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        interval_s: float,
        comment: Callable[[], bytes],
        on_long_wait: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._interval_s = interval_s
        self._comment = comment
        self._on_long_wait, self._asked = on_long_wait, False
        self._lead_s = min(_CHECK_LEAD_S, interval_s / 2)
        self._sent_s = asyncio.get_running_loop().time()

    def __enter__(self) -> Self:
        self._writer.on_check = self.check
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.on_check = None

    def check(self, now_s: float) -> None:
        """Send the due head or comment."""
        writer = self._writer
        if not writer.writable:
            return
        if writer.started and not writer.idle:
            writer.idle, self._sent_s = True, now_s
        silent_s = now_s - self._sent_s
        due = silent_s >= self._interval_s
        if not (writer.started or self._asked) and silent_s >= self._interval_s - self._lead_s:
            self._asked = True
            self._on_long_wait()
        if not writer.started and now_s - writer.opened_s >= _HEAD_DELAY_S:
            writer.send_head()
        elif due:
            self._sent_s = now_s
            if writer.started:
                writer.write(self._comment())
            else:
                writer.open_early(STREAM_HEADERS, self._comment())
            writer.idle = True
