"""The last look at the workers that take requests: between two requests only few change."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.view import WorkerView, places_of, rows_of

LONG_AGO_S = float("-inf")


class Sight:
    """What is seen of workers, and until when that is right but for those that are renewed."""

    def __init__(self, workers: Sequence[WorkerView] = (), until_s: float = LONG_AGO_S) -> None:
        self.until_s = until_s
        self.workers = tuple(workers)
        self.rows = rows_of(workers)
        self._at = {worker.worker_id: at for at, worker in enumerate(workers)}
        self.places = places_of(self.rows)
        self._lanes: dict[str, list[tuple[tuple[str, str], int, int]]] = {
            name: [] for name in self._at
        }
        """Where in `rows` the lanes of a worker stand, and which of its lanes that is."""
        for asked, rows in self.rows.items():
            for place, row in enumerate(rows):
                name = row[4].worker_id
                number = self.workers[self._at[name]].rows.index(row)
                self._lanes[name].append((asked, place, number))

    def renew(self, changed: Sequence[WorkerView]) -> None:
        """Put these workers in place of what was seen of them, where they were seen at all."""
        workers, rows = list(self.workers), dict(self.rows)
        for worker in changed:
            at = self._at.get(worker.worker_id)
            if at is None:
                continue
            workers[at] = worker
            for asked, place, number in self._lanes[worker.worker_id]:
                renewed = list(rows[asked])
                renewed[place] = worker.rows[number]
                rows[asked] = tuple(renewed)
        self.workers, self.rows = tuple(workers), rows
