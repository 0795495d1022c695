"""Thread that makes every MLX call, with a command queue from the event loops.

Commands enter through a queue, events leave by `call_soon_threadsafe`: the thread holds no lock
while MLX runs, and an event loop never waits for it. Every submitted row gets an end.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import mlx.core as mx

from workers.engine.row import Row
from workers.engine.scheduler import LaneScheduler
from workers.engine.types import EngineStopped, LaneName

logger = logging.getLogger(__name__)

T = TypeVar("T")
_STOPPED = "The engine has stopped."


@dataclass(frozen=True, slots=True)
class _Submit:
    lane: LaneName
    row: Row


@dataclass(frozen=True, slots=True)
class _Cancel:
    row: Row


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineThread(Generic[T]):
    """A thread that loads the lanes and steps every busy one in turn until it is stopped."""

    def __init__(self, load: Callable[[], tuple[T, Sequence[LaneScheduler]]]) -> None:
        self._load = load
        self._commands: queue.SimpleQueue[_Submit | _Cancel | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-mlx", daemon=True)
        self._submit_lock = threading.Lock()
        self._accepting = True
        self._loaded: Future[T] = Future()

    def start(self) -> T:
        """Start the thread; return the result of `load`, or raise its error."""
        self._thread.start()
        return self._loaded.result()

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, lane: LaneName, row: Row) -> None:
        """Queue a row for a lane; raise `EngineStopped` if the thread has ended."""
        with self._submit_lock:
            if not self._accepting:
                raise EngineStopped(_STOPPED)
            self._commands.put(_Submit(lane, row))

    def cancel(self, row: Row) -> None:
        """Drop a row before the next step."""
        self._commands.put(_Cancel(row))

    def stop(self, timeout_s: float) -> None:
        """End the thread after its current step; running rows fail with `EngineStopped`."""
        self._commands.put(_Stop())
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            result, lanes = self._load()
        except BaseException as error:  # noqa: BLE001  # start() raises it
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(result)
        by_name = {lane.name: lane for lane in lanes}
        try:
            while self._run_commands(by_name):
                for lane in lanes:
                    if lane.busy:
                        lane.step()
        except Exception:  # the thread ends, and the worker's process with it
            logger.exception("engine.died")
        finally:
            with self._submit_lock:
                self._accepting = False
            while not self._commands.empty():  # submitted during the last step
                command = self._commands.get()
                if isinstance(command, _Submit):
                    by_name[command.lane].add(command.row)
            for lane in lanes:
                lane.close(EngineStopped(_STOPPED))
            mx.clear_streams()  # MLX aborts the process if a thread ends with streams of its own

    def _run_commands(self, lanes: dict[LaneName, LaneScheduler]) -> bool:
        """Run the queued commands, waiting for one while no lane is busy; return False to stop."""
        while True:
            idle = not any(lane.busy for lane in lanes.values())
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            match command:
                case _Submit(lane=name, row=row):
                    lanes[name].add(row)
                case _Cancel(row=row):
                    row.cancelled = True
                case _Stop():
                    return False
