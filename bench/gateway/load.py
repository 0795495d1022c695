"""Load on a gateway: raw HTTP/1.1 over reused connections, so that the client costs little."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast

from bench.gateway import backend
from bench.gateway.contenders import KEY

ANSWER_TIMEOUT_S: Final = 60.0
_PROMPT: Final = "word " * 200


class WrongAnswer(Exception):
    """A gateway returned another answer than the worker sent."""


class Wire(StrEnum):
    """A wire format in which clients ask for a chat."""

    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"


_PATHS: Final = {
    Wire.CHAT: "/v1/chat/completions",
    Wire.MESSAGES: "/v1/messages",
    Wire.RESPONSES: "/v1/responses",
}
_STREAM_ENDS: Final = {
    Wire.CHAT: b"[DONE]",
    Wire.MESSAGES: b"event: message_stop",
    Wire.RESPONSES: b"event: response.completed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request, and the check of its answer."""

    stream: bool
    wire: Wire = Wire.CHAT
    mark: str = ""
    """A mark of the worker, by which it paces its answer."""
    key: str = KEY

    def request(self) -> bytes:
        content = f"{self.mark}: {_PROMPT}" if self.mark else _PROMPT
        fields: dict[str, object] = {"messages": [{"role": "user", "content": content}]}
        if self.wire is Wire.MESSAGES:
            fields["max_tokens"] = backend.WORDS
        elif self.wire is Wire.RESPONSES:
            fields = {"input": content, "store": False}
        fields |= {"model": backend.MODEL, "temperature": 0, "stream": self.stream}
        body = json.dumps(fields).encode()
        head = (
            f"POST {_PATHS[self.wire]} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"content-type: application/json\r\nauthorization: Bearer {self.key}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Connection(asyncio.Protocol):
    """A reused connection with one request at a time."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._received = bytearray()
        self._answered: asyncio.Future[None] | None = None
        self._first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Transports of uvloop do not inherit from asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._first_s and (b'"content"' in data or b'"content"' in self._received):
            self._first_s = time.perf_counter()
        if self._complete() and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(
                exc or WrongAnswer("the connection closed during an answer")
            )

    async def send(self, question: Question, request: bytes) -> float:
        """Send a request; return the seconds to the first word, or raise `WrongAnswer`."""
        self._received.clear()
        self._first_s = 0.0
        self._answered = asyncio.get_running_loop().create_future()
        sent_s = time.perf_counter()
        self._transport.write(request)
        await asyncio.wait_for(self._answered, ANSWER_TIMEOUT_S)
        answer = bytes(self._received)
        if not (answer.startswith(b"HTTP/1.1 200") and _is_complete(answer, question)):
            raise WrongAnswer(answer[:300].decode(errors="replace"))
        return self._first_s - sent_s

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def _complete(self) -> bool:
        if self._received.endswith(b"0\r\n\r\n"):
            return True
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return False
        _, has_length, length = bytes(head.lower()).partition(b"content-length:")
        return bool(has_length) and len(body) >= int(length.split(b"\r\n", 1)[0])


def _is_complete(answer: bytes, question: Question) -> bool:
    """Return whether an answer has all words, in any framing."""
    if question.stream:
        words = answer.count(b'"word ')
        # A response repeats its whole text at the end.
        whole = words == backend.WORDS or question.wire is Wire.RESPONSES
        return words >= backend.WORDS and whole and _STREAM_ENDS[question.wire] in answer
    return b"word word word" in answer


async def send_requests(
    port: int, question: Question, requests: int, concurrency: int, budget_s: float
) -> int:
    """Send requests until the number or the time is reached; return the number of answers."""
    numbers = iter(range(requests))
    until_s = time.perf_counter() + budget_s
    async with asyncio.TaskGroup() as group:  # one wrong answer cancels all tasks
        tasks = [
            group.create_task(_send_sequentially(port, question, numbers, until_s))
            for _ in range(concurrency)
        ]
    return sum(task.result() for task in tasks)


async def _send_sequentially(
    port: int, question: Question, numbers: Iterator[int], until_s: float
) -> int:
    request = question.request()
    answers = 0
    async with connected(port) as connection:
        for _ in numbers:
            await connection.send(question, request)
            answers += 1
            if time.perf_counter() > until_s:
                break
    return answers


async def send_staggered(port: int, *, streams: int, rounds: int) -> list[float]:
    """Run paced streams with staggered starts; return the seconds to each first word."""
    question = Question(stream=True, mark=backend.PACED_MARK)
    request = question.request()
    stagger_s = backend.PACE_S * backend.EVENTS / streams

    async def run_stream(index: int) -> list[float]:
        await asyncio.sleep(index * stagger_s)
        async with connected(port) as connection:
            return [await connection.send(question, request) for _ in range(rounds)]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_stream(index)) for index in range(streams)]
    return [first_s for task in tasks for first_s in task.result()]


class Reconnecting:
    """A connection to a gateway that opens again once the gateway has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: Connection | None = None

    async def send(self, question: Question, request: bytes) -> float:
        """Send a request; return the seconds to the first word, or raise `WrongAnswer`."""
        if self._connection is None or self._connection.closing:
            self._connection = await self._open()
        return await self._connection.send(question, request)

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        except ConnectionRefusedError:
            raise WrongAnswer("the gateway refuses the connection") from None
        return connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Reconnecting]:
    connection = Reconnecting(port)
    try:
        yield connection
    finally:
        connection.close()
