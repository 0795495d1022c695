"""The thread that owns every MLX call, and the bridge between it and event loops.

Commands go in through a queue, events come out by `call_soon_threadsafe`: no lock is held while
MLX runs, and an event loop never waits for it. Whatever is taken in gets an end.
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
    """Loads the lanes, then steps every busy one in turn until it is told to stop."""

    def __init__(self, load: Callable[[], tuple[T, Sequence[LaneScheduler]]]) -> None:
        self._load = load
        self._commands: queue.SimpleQueue[_Submit | _Cancel | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-mlx", daemon=True)
        self._submit_lock = threading.Lock()
        self._accepting = True
        self._loaded: Future[T] = Future()

    def start(self) -> T:
        """Start the thread; return what the loading made, or raise what it raised."""
        self._thread.start()
        return self._loaded.result()

    @property
    def alive(self) -> bool:
        """Say whether the thread still takes work."""
        return self._thread.is_alive()

    def submit(self, lane: LaneName, row: Row) -> None:
        """Hand a row to a lane; raise `EngineStopped` where the thread takes no more."""
        with self._submit_lock:
            if not self._accepting:
                raise EngineStopped(_STOPPED)
            self._commands.put(_Submit(lane, row))

    def cancel(self, row: Row) -> None:
        """Ask for a row to be dropped before the next step."""
        self._commands.put(_Cancel(row))

    def stop(self, timeout_s: float) -> None:
        """End the thread after its current step; rows still running fail with `EngineStopped`."""
        self._commands.put(_Stop())
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            result, lanes = self._load()
        except BaseException as error:  # noqa: BLE001  # handed to whoever called start()
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
            while not self._commands.empty():  # what came during the last step
                command = self._commands.get()
                if isinstance(command, _Submit):
                    by_name[command.lane].add(command.row)
            for lane in lanes:
                lane.close(EngineStopped(_STOPPED))
            mx.clear_streams()  # a thread that ends with streams of its own aborts the process

    def _run_commands(self, lanes: dict[LaneName, LaneScheduler]) -> bool:
        """Carry out the commands that wait; sleep while there is nothing to do at all."""
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
