"""The way to a worker: whose fault it is when there is none, and when it may be tried again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from gateway.errors import Overloaded
from gateway.http.upstream import Connections, retry_after_s
from tests.support.scripted_worker import FakeWorker

NOW_S = 1_445_412_480.0  # Wed, 21 Oct 2015 07:28:00 GMT


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 1),
        ("", 1),
        ("0", 1),
        ("9", 9),
        ("60", 60),
        ("1000000000", 60),
        ("9" * 5000, 60),
        ("-5", 1),
        ("1.5", 1),
        ("1e9", 1),
        ("nan", 1),
        ("soon", 1),
        ("\u0669", 9),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30),
        ("Wed, 21 Oct 2015 07:28:30 -0000", 30),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 1),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60),
        ("Wed, 99 Oct 2015 07:28:30 GMT", 1),
        ("Wed, 21 Oct 99999 07:28:30 GMT", 1),
    ],
)
def test_a_retry_after_is_read_within_reason(value: str | None, seconds: float) -> None:
    assert retry_after_s(value, NOW_S) == seconds


@contextlib.contextmanager
def no_file_left() -> Iterator[None]:
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_f55_a_gateway_without_a_free_file_does_not_blame_the_worker(
    tmp_path: Path, worker: FakeWorker, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def ask() -> None:
        async with Connections(connect_timeout_s=2.0, answer_timeout_s=10.0) as connections:
            with no_file_left(), pytest.raises(Overloaded):
                await connections.send(f"{worker.url}/v1/chat/completions", b"{}", {}, lambda: None)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(ask())
    assert worker.heard == []
