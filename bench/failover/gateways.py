"""One of two gateways behind the shipped nginx is killed under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from tests.support.compose_stack import AS_CLIENT
from tests.support.front import PATH, NginxClient, running_front
from tests.support.running_gateway import chat_body, wait_until

_CLIENTS: Final = 4
_PAUSE_S: Final = 0.02
_BEFORE: Final = 50
"""Answers before a kill: the load is under way."""
_AFTER_S: Final = 3.0


@dataclass(slots=True)
class GatewayKills:
    """What clients saw of the kills."""

    next_s: list[float] = field(default_factory=list)
    """From the end of a gateway to the first answer to a request that began after it."""
    begun: int = 0
    """Requests that began in the seconds after a kill."""
    failed: int = 0
    """Of these, those without an answer."""
    interrupted: int = 0
    """Requests that had begun before its end, and failed."""
    notes: list[str] = field(default_factory=list)


class _Asked(NamedTuple):
    began_s: float
    ended_s: float
    status: int


def _are_under_way(asked: Sequence[_Asked]) -> bool:
    return len(asked) >= _BEFORE


def kill_gateways(kills: int, home: Path, advance: Callable[[], None]) -> GatewayKills:
    """Kill the first gateway, then the second one, and so on, each in a new stack."""
    seen = GatewayKills()
    for number in range(kills):
        folder = home / str(number)
        folder.mkdir()
        with running_front(folder) as front, front.joined():
            with _asking(front) as asked:
                wait_until(partial(_are_under_way, asked))
                front.kill(front.dns.addresses[number % 2])
                killed_s = time.monotonic()
                time.sleep(_AFTER_S)
            _judge(seen, asked, killed_s)
        advance()
    return seen


@contextmanager
def _asking(front: NginxClient) -> Iterator[list[_Asked]]:
    """Let clients ask without a pause, each with one connection to nginx."""
    asked: list[_Asked] = []
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=front.client.base_url, headers=AS_CLIENT, timeout=30) as client:
            while not ended.wait(_PAUSE_S):
                began_s = time.monotonic()
                try:
                    status = client.post(PATH, json=chat_body()).status_code
                except httpx.HTTPError:
                    status = 0
                asked.append(_Asked(began_s, time.monotonic(), status))

    with ThreadPoolExecutor(_CLIENTS) as clients:
        running = [clients.submit(ask) for _ in range(_CLIENTS)]
        try:
            yield asked
        finally:
            ended.set()
    for one in running:
        one.result()


def _judge(seen: GatewayKills, asked: list[_Asked], killed_s: float) -> None:
    after = [one for one in asked if one.began_s >= killed_s]
    answered = [one.ended_s - killed_s for one in after if one.status == httpx.codes.OK]
    seen.next_s.append(min(answered, default=float("inf")))
    seen.begun += len(after)
    failed = [one for one in after if one.status != httpx.codes.OK]
    seen.failed += len(failed)
    for one in failed:
        seen.notes.append(f"{one.status} {one.began_s - killed_s:.3f} s after a kill")
    seen.interrupted += sum(one.status != httpx.codes.OK for one in asked if one.began_s < killed_s)
