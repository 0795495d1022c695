"""The last minutes: snapshots of sums, taken beside all requests, whose differences are windows.

What a request adds it adds once, to sums that only grow; a window is the sums of now less those of
then. So no window costs a request anything, and none counts a request in part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gateway.telemetry.stats import NOTHING, Figures, Place, total

STEP_S = 10.0
LONGEST_S = 900.0


class Snapshot(NamedTuple):
    """All sums at one moment."""

    at_s: float
    places: Mapping[Place, Figures]
    everywhere: Figures
    """The sum over all places."""

    def since(self, then: Snapshot) -> dict[Place, Figures]:
        """Return what has come since then."""
        return {
            place: figures.since(then.places.get(place, NOTHING))
            for place, figures in self.places.items()
            if figures is not then.places.get(place)
        }


class Windows:
    """Snapshots of the last quarter of an hour. `clock` is monotonic: no jump of the day's time."""

    def __init__(
        self, look: Callable[[], Mapping[Place, Figures]], clock: Callable[[], float]
    ) -> None:
        self._look = look
        self._clock = clock
        self._kept: deque[Snapshot] = deque([Snapshot(clock(), {}, NOTHING)])

    async def step(self) -> None:
        """Keep a snapshot; to be called every `STEP_S`."""
        self.keep()

    def keep(self) -> None:
        """Keep a snapshot for as long as any window may reach back."""
        now = self.latest()
        self._kept.append(now)
        while now.at_s - self._kept[1].at_s >= LONGEST_S:
            self._kept.popleft()

    def latest(self) -> Snapshot:
        """Take a snapshot for whoever reads now."""
        places = self._look()
        return Snapshot(self._clock(), places, total(places.values()))

    def reach_back(self, now: Snapshot, window_s: float) -> list[Snapshot]:
        """List the snapshots of a window, its beginning first and `now` last.

        It begins with the newest one that is old enough, or where this gateway began.
        """
        found = [now]
        for snapshot in reversed(self._kept):
            found.append(snapshot)
            if now.at_s - snapshot.at_s >= window_s:
                break
        return found[::-1]
