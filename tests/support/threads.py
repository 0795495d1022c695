"""The threads that functions of the program run in."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest


def record_threads(monkeypatch: pytest.MonkeyPatch, *places: tuple[object, str]) -> set[str]:
    """Return a set that gets the names of the threads which call the functions at these places."""
    threads: set[str] = set()

    def recorded(work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def run(*given: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return work(*given, **options)

        return run

    for place, name in places:
        monkeypatch.setattr(place, name, recorded(getattr(place, name)))
    return threads
