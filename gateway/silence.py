"""How long somebody has waited for something new, and the alarm for who has waited too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Silence:
    """Calls `on_silence` once nothing was heard for longer than the limit, while somebody listens.

    Streams are heard from all the time, so what is heard only notes the time. One alarm serves
    waits and limits; it rings early rather than be set anew, looks at the clock, and goes on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_silence: Callable[[], None]) -> None:
        self._loop = loop
        self._on_silence = on_silence
        self._limit_s = 0.0
        self._since_s = 0.0
        self._listening = False
        self._alarm: asyncio.TimerHandle | None = None

    def limit(self, seconds: float) -> None:
        """Bound each silence from here on."""
        self._limit_s = seconds
        self._since_s = self._loop.time()
        self._set_alarm()

    def listen(self) -> None:
        """Count from here on, also where it was counted already: something was heard."""
        self._listening = True
        self._since_s = self._loop.time()
        if self._alarm is None:
            self._set_alarm()

    def stop_listening(self) -> None:
        """Count no more: nobody wants to hear anything now."""
        self._listening = False

    def end(self) -> None:
        """Never call again."""
        self._listening = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set_alarm(self) -> None:
        due_s = self._since_s + self._limit_s
        if self._alarm is not None:
            if self._alarm.when() <= due_s:
                return
            self._alarm.cancel()
        self._alarm = self._loop.call_at(due_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if not self._listening:
            return  # who listens again sets it again
        if self._loop.time() >= self._since_s + self._limit_s:
            self._on_silence()
        else:
            self._set_alarm()
