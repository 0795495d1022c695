"""Keep the stream of a client alive while no worker sends anything for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Self

from gateway.responses.exchange import AnswerWriter
from gateway.types import Header

# So long after a worker has begun, an error still has a status of its own, and the head still
# leaves in one packet with the first token.
_HEAD_DELAY_S = 0.25
# So long before an early head, or half of the interval, a request may still be refused in time.
_CHECK_LEAD_S = 2.0


class KeepAlive:
    """A context in which a stream sends its head in time, and comments in place of events.

    The head goes out when a worker has begun, or after one interval; then each interval without an
    event ends with a comment, so that no idle limit on the way to the client cuts a working answer.
    Some time before a head goes out early, `on_long_wait` may still find what ends the request.
    The connection calls `check` about once a second: a timer for each request costs more.
    """

    def __init__(
        self,
        writer: AnswerWriter,
        headers: Iterable[Header],
        interval_s: float,
        comment: Callable[[], bytes],
        on_long_wait: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._headers = headers
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
        """Send what is due."""
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
                writer.open_early(self._headers, self._comment())
            writer.idle = True
