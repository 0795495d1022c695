"""Thread that makes every MLX call, with a command queue from the event loops.

Commands enter through a queue, events leave by `call_soon_threadsafe`: the thread holds no lock
while MLX runs, and an event loop never waits for it. Every submitted row gets an end.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import mlx.core as mx

from paceline.lifecycle import TRIM_INTERVAL_S, trim_heap
from workers.engine.decode.memory_pressure import MemoryMonitor, MemoryReading
from workers.engine.model.device import memory_limit_bytes
from workers.engine.types import EngineError, EngineState, EngineStopped

logger = logging.getLogger(__name__)

R = TypeVar("R")
_STOPPED = "The engine has stopped."


class Lane(Protocol):
    """Rows that the thread computes step by step."""

    @property
    def busy(self) -> bool:
        """Whether there is a row to compute."""

    def step(self) -> None:
        """Compute a part of the rows; an error ends the thread."""

    def close(self, reason: EngineError) -> None:
        """End all rows with an error."""


class EngineThread:
    """A thread that steps every busy lane in turn until it is stopped.

    Between two steps it also returns freed heap to the system: requests of
    all sizes leave gaps between blocks in use, 45 MB within 4,000 hostile ones.
    """

    def __init__(self) -> None:
        self._lanes: Sequence[Lane] = ()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-mlx", daemon=True)
        self._submit_lock = threading.Lock()
        self._accepting = True
        self._stopping = False
        self._trim_s = time.monotonic() + TRIM_INTERVAL_S

    def start(self, load: Callable[[], tuple[R, Sequence[Lane]]]) -> R:
        """Start the thread; return the lanes and the other results of `load`, or raise its error.

        MLX aborts a process that ends while a thread of it runs, so that the thread then ends too.
        """

        def run() -> R:
            result, self._lanes = load()
            return result

        loaded = self.call(run)
        self._thread.start()
        try:
            return loaded.result()
        except BaseException:
            self.stop(None)
            raise

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread between two steps; raise `EngineStopped` if it has ended.

        An error of it ends the thread.
        """
        with self._submit_lock:
            if not self._accepting:
                raise EngineStopped(_STOPPED)
            self._commands.put(work)

    def call(self, work: Callable[[], R]) -> Future[R]:
        """Run `work` as `submit` does; the future has its result or its error.

        A future that is cancelled before is not run.
        """
        future: Future[R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  # the caller raises it
                future.set_exception(error)

        self.submit(run)
        return future

    def stop(self, timeout_s: float | None) -> None:
        """End the thread after its current step; running rows fail with `EngineStopped`."""
        self._stopping = True
        self._commands.put(lambda: None)  # the thread may be waiting for a command
        self._thread.join(timeout_s)

    def _run(self) -> None:
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
            if time.monotonic() >= self._trim_s:
                trim_heap()
                self._trim_s = time.monotonic() + TRIM_INTERVAL_S
            idle = not any(lane.busy for lane in self._lanes)
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            command()
        return False


class ThreadedEngine:
    """An engine whose lanes run on their own thread."""

    def __init__(self, thread: EngineThread, monitor: MemoryMonitor) -> None:
        self.thread = thread
        self.monitor = monitor

    @property
    def alive(self) -> bool:
        """Return whether the engine accepts requests."""
        return self.thread.alive

    @property
    def ready(self) -> bool:
        """Return whether it serves now, as always while it is alive."""
        return self.alive

    def state(self) -> EngineState:
        """Return the memory in use by MLX, and its limit."""
        return EngineState(
            memory_bytes=mx.get_active_memory(), memory_limit_bytes=memory_limit_bytes()
        )

    def memory_reading(self) -> MemoryReading:
        """Return the memory of the process."""
        return self.monitor.reading()

    async def drop_prefixes(self, scope: str | None) -> None:
        """Delete nothing: an engine without prefixes has none of a scope."""

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; running requests raise `EngineStopped`."""
        self.thread.stop(timeout_s)
