"""Load shedding: reject new requests when the event loop is late or too much is in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator

from gateway.assembly import LOOP_CHECK_S
from gateway.errors import Overloaded

BODIES_LIMIT_BYTES = 512 * 1024 * 1024
"""Of the bodies of all running requests; parsed, they take several times as much memory."""
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
        self.note(late_s)
        return late_s

    def note(self, late_s: float) -> None:
        """Record the delay of one measurement."""
        self._late_s.append(max(0.0, late_s))
        recent = tuple(self._late_s)[-_SUSTAINED_TICKS:]
        self.too_late = len(recent) == _SUSTAINED_TICKS and min(recent) > _TOO_LATE_S

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
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
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
            self._levels.popitem(last=False)
        return min(_LONGEST_DELAY_S, max(0.0, over / per_s))


class Load:
    """The running requests of one gateway and the memory of their bodies."""

    def __init__(self, limit_requests: int, clock: Callable[[], float]) -> None:
        self._limit_requests = limit_requests
        self._body_bytes = 0
        self._held_bytes: Counter[str] = Counter()
        """By client."""
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

    def hold(self, body_bytes: int, client: str = "") -> None:
        """Add bytes of a body that is being read; raise `Overloaded` above the limit.

        A client may have three times as many as are left, so no client takes what others need.
        """
        self._body_bytes += body_bytes
        self._held_bytes[client] += body_bytes
        if self._held_bytes[client] > 3 * (BODIES_LIMIT_BYTES - self._body_bytes):
            raise Overloaded

    def end(self, body_bytes: int, client: str = "") -> None:
        """Remove a request, and the bytes that `hold` added for it."""
        self._body_bytes -= body_bytes
        self._held_bytes[client] -= body_bytes
        if not self._held_bytes[client]:
            del self._held_bytes[client]
        self.requests -= 1
        if not self.requests:
            self.idle.set()

    @contextlib.contextmanager
    def counted(self, client: str = "") -> Iterator[Callable[[int], None]]:
        """Admit and count a request that no worker gets; yield `hold` for its body."""
        held_bytes = 0

        def hold(part_bytes: int) -> None:
            nonlocal held_bytes
            held_bytes += part_bytes
            self.hold(part_bytes, client)

        self.begin()
        try:
            self.admit()
            yield hold
        finally:
            self.end(held_bytes, client)
