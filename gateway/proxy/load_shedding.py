"""Load shedding: reject new requests when the event loop is late or too many run."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from gateway.assembly import LOOP_CHECK_S
from gateway.errors import Overloaded

_REMEMBERED_S = 10.0
# One long pause (a sleeping machine, a large body) is no overload; a lasting delay is.
_SUSTAINED_TICKS = 4
_TOO_LATE_S = 0.25
_REJECTIONS_PER_S = 100.0
_REJECTIONS_BURST = 100.0
_LONGEST_DELAY_S = 1.0
_REJECTED_CLIENTS = 1024


class LoopLag:
    """The delay of the event loop. `clock` is monotonic and in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._late_s: deque[float] = deque([0.0], maxlen=int(_REMEMBERED_S / LOOP_CHECK_S))
        self._due_s = float("inf")
        self.too_late = False
        """The last four measurements were all late."""

    def measure(self) -> float:
        """Measure the delay since the last call, 0 s at first; call it every `LOOP_CHECK_S`."""
        now_s = self._clock()
        late_s = max(0.0, now_s - self._due_s)
        self._due_s = now_s + LOOP_CHECK_S
        self._late_s.append(late_s)
        recent = tuple(self._late_s)[-_SUSTAINED_TICKS:]
        self.too_late = len(recent) == _SUSTAINED_TICKS and min(recent) > _TOO_LATE_S
        return late_s

    @property
    def worst_s(self) -> float:
        """Return the longest delay of the last ten seconds."""
        return max(self._late_s)


class RejectionPacer:
    """Delays the rejections of a client that ignores `Retry-After`.

    Without a delay such a client repeats its requests as fast as they are rejected, and takes the
    processor from the others. A client's first hundred rejections are sent at once, then a hundred
    a second; its connections share that rate. `clock` is monotonic and in seconds. `share` is that
    of both hundreds: who sends wrong secrets has less.
    """

    def __init__(self, clock: Callable[[], float], share: float = 1.0) -> None:
        self._clock = clock
        self._share = share
        self._levels: dict[str, tuple[float, float]] = {}
        """By client: the rejections above the rate, and when they were counted; oldest first."""

    def delay_s(self, client: str) -> float:
        """Count a rejection, and return how long it waits."""
        now_s = self._clock()
        level, counted_s = self._levels.pop(client, (0.0, now_s))
        per_s, burst = _REJECTIONS_PER_S * self._share, _REJECTIONS_BURST * self._share
        level = max(0.0, level - (now_s - counted_s) * per_s) + 1.0
        over = level - burst
        # A client that stops repeating has its burst back after two seconds.
        longest = burst + _LONGEST_DELAY_S * per_s
        self._levels[client] = (min(level, longest), now_s)
        if len(self._levels) > _REJECTED_CLIENTS:
            del self._levels[next(iter(self._levels))]
        return min(_LONGEST_DELAY_S, max(0.0, over / per_s))


class Load:
    """The running requests of one gateway."""

    def __init__(self, limit_requests: int, clock: Callable[[], float]) -> None:
        self._limit_requests = limit_requests
        self.requests = 0
        self.idle = asyncio.Event()
        """Set while no request runs."""
        self.idle.set()
        self.lag = LoopLag(clock)

    def begin(self) -> None:
        """Count a request."""
        self.requests += 1
        self.idle.clear()

    def admit(self, make_room: Callable[[], bool] = lambda: False) -> None:
        """Raise `Overloaded` if there are too many requests; this one already counts.

        `make_room` may reject another one instead, and returns whether it has.
        """
        if self.lag.too_late or (self.requests > self._limit_requests and not make_room()):
            raise Overloaded

    def end(self) -> None:
        """Remove a request."""
        self.requests -= 1
        if not self.requests:
            self.idle.set()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Admit and count a request that no worker gets."""
        self.begin()
        try:
            self.admit()
            yield
        finally:
            self.end()
