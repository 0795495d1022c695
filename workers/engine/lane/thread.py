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
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx

from workers.engine.decode.memory_pressure import HeapTrimmer
from workers.engine.types import EngineError, EngineStopped

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
RowT_contra = TypeVar("RowT_contra", contravariant=True)
RowT = TypeVar("RowT")
_STOPPED = "The engine has stopped."


class Lane(Protocol[RowT_contra]):
    """Rows that the thread computes step by step."""

    @property
    def busy(self) -> bool:
        """Whether there is a row to compute."""

    def add(self, row: RowT_contra) -> None:
        """Queue a row."""

    def step(self) -> None:
        """Compute a part of the rows; an error ends the thread."""

    def close(self, reason: EngineError) -> None:
        """End all rows with an error."""


class EngineThread(Generic[T]):
    """A thread that loads the lanes and steps every busy one in turn until it is stopped.

    Between two steps it also gives the system what the process has freed of its heap.
    """

    def __init__(self, load: Callable[[], tuple[T, Sequence[Lane[Any]]]]) -> None:
        self._load = load
        self._lanes: Sequence[Lane[Any]] = ()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-mlx", daemon=True)
        self._submit_lock = threading.Lock()
        self._accepting = True
        self._stopping = False
        self._trimmer = HeapTrimmer()
        self._loaded: Future[T] = Future()

    def start(self) -> T:
        """Start the thread; return the result of `load`, or raise its error."""
        self._thread.start()
        try:
            return self._loaded.result()
        except BaseException:
            self._thread.join()  # MLX aborts a process that ends while a thread of it runs
            raise

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, lane: Lane[RowT], row: RowT) -> None:
        """Queue a row for a lane; raise `EngineStopped` if the thread has ended."""
        with self._submit_lock:
            if not self._accepting:
                raise EngineStopped(_STOPPED)
            self._commands.put(lambda: lane.add(row))

    def call(self, work: Callable[[], R]) -> Future[R]:
        """Run `work` on the thread between two steps; raise `EngineStopped` if it has ended.

        A future that is cancelled before is not run.
        """
        future: Future[R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001  # the caller raises it
                future.set_exception(error)

        with self._submit_lock:
            if not self._accepting:
                raise EngineStopped(_STOPPED)
            self._commands.put(run)
        return future

    def stop(self, timeout_s: float) -> None:
        """End the thread after its current step; running rows fail with `EngineStopped`."""
        self._stopping = True
        self._commands.put(lambda: None)  # the thread may be waiting for a command
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            result, self._lanes = self._load()
        except BaseException as error:  # noqa: BLE001  # start() raises it
            mx.clear_streams()
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(result)
        try:
            while self._run_commands():
                for lane in self._lanes:
                    if lane.busy:
                        lane.step()
        except Exception:  # the thread ends, and the worker's process with it
            logger.exception("engine.died")
        finally:
            with self._submit_lock:
                self._accepting = False
            while not self._commands.empty():  # submitted during the last step
                self._commands.get()()
            for lane in self._lanes:
                lane.close(EngineStopped(_STOPPED))
            mx.clear_streams()  # MLX aborts the process if a thread ends with streams of its own

    def _run_commands(self) -> bool:
        """Run the queued commands, waiting for one while no lane is busy; return False to stop."""
        while not self._stopping:
            self._trimmer.trim_if_due()
            idle = not any(lane.busy for lane in self._lanes)
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            command()
        return False
