"""One answer on its way to the client: whole, or as a stream of events.

A client that leaves ends the work done for it, for whole answers as for streams.

Several generations as one stream of events, each tagged with the choice it belongs to.

Server-sent events, the one framing of streamed answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from policies.request.profile import Endpoint
from workers.engine.types import (
    Delta,
    Event,
    Finished,
    Generation,
    GenerationFailed,
    InvalidGeneration,
)
from workers.server.errors import BadRequest, ClientLeft, ClientStalled, as_refusal
from workers.server.openai_format import (
    ChatChoice,
    ChoiceWriter,
    CompletionChoice,
    metrics_of,
    usage_of,
)
from workers.server.ports import Json, ServingEngine
from workers.server.request import Call
from workers.server.runtime import Worker
from workers.server.tool_calls import ToolCallSplitter

Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work; cancel it and raise `ClientLeft` when the client is gone first.

    The body must have been read: what then comes from `receive` is the disconnect.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def events_of(
    engine: ServingEngine, generations: Sequence[Generation]
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all choices as they come; closing it removes every row.

    The first error of any choice ends all of them and is raised.
    """
    if len(generations) == 1:
        async with aclosing(_run(engine, generations[0])) as events:
            async for event in events:
                yield 0, event
        return
    arrived: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_collect(engine, generation, index, arrived))
        for index, generation in enumerate(generations)
    ]
    try:
        running = len(tasks)
        while running:
            index, outcome = await arrived.get()
            if isinstance(outcome, Exception):
                raise outcome
            yield index, outcome
            running -= isinstance(outcome, Finished)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(
    engine: ServingEngine,
    generation: Generation,
    index: int,
    arrived: asyncio.Queue[tuple[int, Event | Exception]],
) -> None:
    try:
        async with aclosing(_run(engine, generation)) as events:
            async for event in events:
                arrived.put_nowait((index, event))
    except Exception as error:  # noqa: BLE001 - handed over, and raised by the reader
        arrived.put_nowait((index, error))


async def _run(engine: ServingEngine, generation: Generation) -> AsyncGenerator[Event, None]:
    """Yield events up to `Finished`; an end without it is a failure, never a short answer."""
    async with aclosing(engine.generate(generation)) as events:
        async for event in events:
            yield event
            if isinstance(event, Finished):
                return
    raise GenerationFailed("The engine ended a generation without finishing it.")


log = logging.getLogger(__name__)
WRITE_STALL_S = 60.0
"""A reader that takes nothing for so long loses its row to others (nginx: send_timeout)."""
_ID_PREFIX = {Endpoint.CHAT: "chatcmpl-", Endpoint.COMPLETIONS: "cmpl-"}
_WHOLE = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETIONS: "text_completion"}
_CHUNK = {Endpoint.CHAT: "chat.completion.chunk", Endpoint.COMPLETIONS: "text_completion"}


class Answer(Response):
    """Generates while it is sent; a client that leaves ends the generation.

    Errors before the first event are raised, so that they get a status of their own; later ones
    end the stream with an error event and without `[DONE]`.
    """

    def __init__(self, worker: Worker, call: Call) -> None:
        super().__init__()
        self._worker = worker
        self._call = call
        self._writers = [_writer(call, index) for index in range(len(call.generations))]
        self._ends: dict[int, Finished] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hold the answer in hand from its first row to its last byte."""
        with self._worker.traffic.admitted():
            try:
                if self._call.profile.stream:
                    await while_connected(receive, self._send_stream(send))
                else:
                    whole = await while_connected(receive, self._make_whole())
                    headers = {"x-request-id": self._call.request_id}
                    await JSONResponse(whole, headers=headers)(scope, receive, send)
            except InvalidGeneration as error:
                raise self._in_words_of_the_body(error) from error
            except (ClientLeft, ClientStalled) as gone:
                # Nobody is left to be told; the server closes the connection.
                log.info("answer.%s request_id=%s", gone.code, self._call.request_id)

    async def _make_whole(self) -> Json:
        async with aclosing(events_of(self._worker.engine, self._call.generations)) as events:
            async for index, event in events:
                self._entries(index, event)
        return {
            **self._envelope(_WHOLE, [writer.whole() for writer in self._writers]),
            "usage": usage_of(self._ended()),
            **metrics_of(self._ended(), detailed=self._call.detailed_metrics),
        }

    async def _send_stream(self, send: Send) -> None:
        started = False
        async with aclosing(events_of(self._worker.engine, self._call.generations)) as events:
            try:
                async for index, event in events:
                    if not started:
                        started = True
                        await _send(send, self._start())
                        await self._send_entries(send, self._opening())
                    await self._send_entries(send, self._entries(index, event))
                await self._send_tail(send)
            except Exception as error:
                if not started or isinstance(error, ClientStalled):
                    raise
                refusal = as_refusal(error, self._call.request_id)
                await _send(send, _piece(encode_event(refusal.body())))
                await _send(send, _piece(b"", last=True))

    async def _send_tail(self, send: Send) -> None:
        if self._call.profile.include_usage:
            ends = self._ended()
            chunk = self._envelope(_CHUNK, [])
            metrics = metrics_of(ends, detailed=self._call.detailed_metrics)
            chunk |= {"usage": usage_of(ends), **metrics}
            await _send(send, _piece(encode_event(chunk)))
        await _send(send, _piece(DONE, last=True))

    async def _send_entries(self, send: Send, entries: Sequence[Json]) -> None:
        if not entries:
            return
        unknown_yet = {"usage": None} if self._call.profile.include_usage else {}
        chunks = (self._envelope(_CHUNK, [entry]) | unknown_yet for entry in entries)
        await _send(send, _piece(b"".join(encode_event(chunk) for chunk in chunks)))

    def _in_words_of_the_body(self, error: InvalidGeneration) -> BadRequest:
        # The engine knows one prompt, and calls it by the name chats have for it.
        completion = self._call.profile.endpoint is Endpoint.COMPLETIONS
        param = "prompt" if completion and error.param == "messages" else error.param
        return BadRequest(error.message, param=param, code=error.code)

    def _opening(self) -> Sequence[Json]:
        return [entry for writer in self._writers for entry in writer.opening()]

    def _entries(self, index: int, event: Delta | Finished) -> Sequence[Json]:
        if isinstance(event, Delta):
            return self._writers[index].more(event)
        self._ends[index] = event
        return self._writers[index].end(event)

    def _ended(self) -> Sequence[Finished]:
        return [self._ends[index] for index in range(len(self._writers))]

    def _envelope(self, kinds: dict[Endpoint, str], choices: Sequence[Json]) -> dict[str, Json]:
        endpoint = self._call.profile.endpoint
        return {
            "id": _ID_PREFIX[endpoint] + self._call.request_id,
            "object": kinds[endpoint],
            "created": self._call.created_s,
            "model": self._call.model,
            "choices": choices,
        }

    def _start(self) -> Json:
        headers = {**HEADERS, "x-request-id": self._call.request_id}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}


def _writer(call: Call, index: int) -> ChoiceWriter:
    top_logprobs = call.profile.top_logprobs
    if call.profile.endpoint is Endpoint.COMPLETIONS:
        return CompletionChoice(index, echo=call.echo, top_logprobs=top_logprobs)
    splitter = None
    if call.tool_format is not None:
        at_most = 1 if call.single_tool_call else None
        splitter = ToolCallSplitter(call.tool_format, at_most=at_most)
    return ChatChoice(index, splitter=splitter, logprobs=top_logprobs is not None)


def _piece(body: bytes, *, last: bool = False) -> Json:
    return {"type": "http.response.body", "body": body, "more_body": not last}


async def _send(send: Send, message: Json) -> None:
    try:
        async with asyncio.timeout(WRITE_STALL_S):
            await send(message)
    except TimeoutError as error:
        raise ClientStalled from error


DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode_event(payload: Json) -> bytes:
    """Frame one JSON value."""
    return f"data: {_ENCODER.encode(payload)}\n\n".encode()
