"""Blocking calls to a disk that may hang."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

TIMEOUT_S = 5.0
_QUEUE_LIMIT = 64
Result = TypeVar("Result")


class DiskThread:
    """Runs blocking calls one after another, in a daemon thread that lives while there are any.

    A disk that hangs blocks only this thread: not the threads of asyncio, which other work needs,
    and not the end of the process, which waits for those.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running = False

    async def run(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call; raise `TimeoutError` if the disk hangs.

        A call that has begun goes on after the timeout; others are dropped.
        """
        future: Future[Result] = Future()
        with self._lock:
            if len(self._calls) >= _QUEUE_LIMIT:
                raise TimeoutError
            self._calls.append((future, call))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._running = False
                    return
                future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001  # the caller raises it
                future.set_exception(error)
            else:
                future.set_result(result)
