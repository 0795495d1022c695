"""The load on a gateway: raw HTTP/1.1 on kept connections, so that asking costs next to nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

from bench.gateway import backend
from bench.gateway.contenders import KEY

ANSWER_TIMEOUT_S: Final = 60.0
_PROMPT: Final = "word " * 200


class WrongAnswer(Exception):
    """A gateway did not relay what the worker said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is sent, and what a right answer contains."""

    stream: bool
    paced: bool = False

    def request(self) -> bytes:
        """Return the bytes of the whole request."""
        words = f"{backend.PACED_MARK}: {_PROMPT}" if self.paced else _PROMPT
        body = json.dumps(
            {
                "model": backend.MODEL,
                "temperature": 0,
                "stream": self.stream,
                "messages": [{"role": "user", "content": words}],
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"content-type: application/json\r\nauthorization: Bearer {KEY}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Connection(asyncio.Protocol):
    """One kept connection; asks one question at a time."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._received = bytearray()
        self._answered: asyncio.Future[None] | None = None
        self._first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not derived from it

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._first_s and (b'"content"' in data or b'"content"' in self._received):
            self._first_s = time.perf_counter()
        if self._complete() and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or WrongAnswer("closed in an answer"))

    async def ask(self, question: Question, request: bytes) -> float:
        """Return the seconds to the first word; raise `WrongAnswer`."""
        self._received.clear()
        self._first_s = 0.0
        self._answered = asyncio.get_running_loop().create_future()
        sent_s = time.perf_counter()
        self._transport.write(request)
        await asyncio.wait_for(self._answered, ANSWER_TIMEOUT_S)
        answer = bytes(self._received)
        if not (answer.startswith(b"HTTP/1.1 200") and _is_right(answer, question)):
            raise WrongAnswer(answer[:300].decode(errors="replace"))
        return self._first_s - sent_s

    @property
    def closing(self) -> bool:
        """Say whether the gateway has closed it."""
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def _complete(self) -> bool:
        if self._received.endswith(b"0\r\n\r\n"):
            return True
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return False
        _, told, length = bytes(head.lower()).partition(b"content-length:")
        return bool(told) and len(body) >= int(length.split(b"\r\n", 1)[0])


def _is_right(answer: bytes, question: Question) -> bool:
    """Count the words; however a gateway writes the frames, each has its own."""
    if question.stream:
        return answer.count(b'"word ') == backend.WORDS and b"[DONE]" in answer
    return b"word word word" in answer


async def ask_many(
    port: int, question: Question, *, requests: int, at_once: int, budget_s: float
) -> int:
    """Ask until the number is reached or the time is over; return how many were answered."""
    waiting = iter(range(requests))
    until_s = time.perf_counter() + budget_s
    async with asyncio.TaskGroup() as group:  # one wrong answer ends all the asking
        asking = [
            group.create_task(_ask_in_turn(port, question, waiting, until_s))
            for _ in range(at_once)
        ]
    return sum(task.result() for task in asking)


async def _ask_in_turn(
    port: int, question: Question, waiting: Iterator[int], until_s: float
) -> int:
    request = question.request()
    connection = await _connected(port)
    asked = 0
    try:
        for _ in waiting:
            if connection.closing:
                connection = await _connected(port)
            await connection.ask(question, request)
            asked += 1
            if time.perf_counter() > until_s:
                break
    finally:
        connection.close()
    return asked


async def ask_staggered(port: int, *, streams: int, rounds: int) -> list[float]:
    """Keep so many paced streams running, begun apart; return the seconds to each first word."""
    question = Question(stream=True, paced=True)
    request = question.request()
    apart_s = backend.PACE_S * backend.EVENTS / streams

    async def keep_one(place: int) -> list[float]:
        await asyncio.sleep(place * apart_s)
        connection = await _connected(port)
        found = []
        try:
            for _ in range(rounds):
                if connection.closing:
                    connection = await _connected(port)
                found.append(await connection.ask(question, request))
        finally:
            connection.close()
        return found

    async with asyncio.TaskGroup() as group:
        kept = [group.create_task(keep_one(place)) for place in range(streams)]
    return [first_s for task in kept for first_s in task.result()]


async def _connected(port: int) -> Connection:
    loop = asyncio.get_running_loop()
    with suppress(ConnectionRefusedError):
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        return connection
    raise WrongAnswer("the gateway takes no connection")
