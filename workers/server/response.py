"""The response to a completion request: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.protocol import RUNNING_USAGE_TOKENS
from paceline.request.profile import Endpoint
from workers.engine import types
from workers.engine.prefix.transfer import PrefixSource
from workers.server.answer_progress import AnswerProgress
from workers.server.engines import Json
from workers.server.errors import BadRequest, ClientLeft, ClientStalled, as_request_error
from workers.server.openai_format import (
    ChatChoice,
    CompletionChoice,
    render_metrics,
    render_usage,
    split_entry,
)
from workers.server.request import CompletionRequest, while_connected
from workers.server.runtime import Worker
from workers.server.tool_calls import ToolCallSplitter

log = logging.getLogger(__name__)

WRITE_STALL_S = 60.0
"""A client that reads nothing for this long loses its row of the batch (nginx: send_timeout)."""
_OBJECTS = {
    Endpoint.CHAT: "chat.completion chat.completion.chunk chatcmpl-".split(),
    Endpoint.COMPLETIONS: "text_completion text_completion cmpl-".split(),
}
"""The `object` of an answer and of a chunk of each endpoint, and the prefix of their ids."""
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
EVENT_LIMIT_BYTES = 256 * 1024
"""Of a chunk: gateways, proxies and clients have bounds of their own."""
_PART_BYTES = EVENT_LIMIT_BYTES // 2
_GROUP_LIMIT_BYTES = 512 * 1024
_DONE = b"data: [DONE]\n\n"
_WAITING = b": waiting\n\n"
_KEEPALIVE = b": keepalive\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class WorkResponse(Response):
    """A response that is computed while it is sent; a disconnect of the client cancels that."""

    def __init__(
        self, worker: Worker[Any], request_id: str, *, even_draining: bool = False
    ) -> None:
        super().__init__()
        self._worker = worker
        self._request_id = request_id
        self._even_draining = even_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute and send; count as a request in flight until the last byte."""
        with self._worker.traffic.admit(even_draining=self._even_draining):
            try:
                body = await while_connected(receive, self._respond(send))
            except ClientLeft as gone:
                # No error response: the server closes the connection.
                log.info("response.%s request_id=%s", gone.code, self._request_id)
                return
            if body is not None:
                headers = {"x-request-id": self._request_id}
                whole = Response(body, headers=headers, media_type="application/json")
                await whole(scope, receive, send)

    async def _respond(self, send: Send) -> bytes | None:
        """Return the JSON of the response; None if it has been sent."""
        raise NotImplementedError


class CompletionResponse(WorkResponse):
    """A response that generates while it is sent.

    An error before the head is raised, and gets its own status; a later one ends the stream
    with an error event and without `[DONE]`.
    """

    def __init__(
        self, worker: Worker, request: CompletionRequest, prefix_sources: Sequence[PrefixSource]
    ) -> None:
        super().__init__(worker, request.request_id)
        self._request = request
        generate = partial(worker.engine.generate, prefix_sources=prefix_sources)
        self._events = partial(events_of, generate, request.generations)
        self._writers = [_writer(request, index) for index in range(len(request.generations))]
        self._finished: dict[int, types.Finished] = {}
        self._usages: dict[int, types.Usage] = {}
        """Of each choice so far."""
        # The first chunk has the usage of the prompt.
        self._reported_tokens = -RUNNING_USAGE_TOKENS
        self._progress: AnswerProgress | None = None
        if request.reports_progress:
            self._progress = AnswerProgress(None if request.given else request.created_s)
        self._held: dict[int, list[Json]] = {}
        """Entries of choices that belong to the next ones."""

    async def _respond(self, send: Send) -> bytes | None:
        try:
            if not self._request.profile.stream:
                return _ENCODER.encode(await self._complete()).encode()
            await self._stream(send)
        except types.InvalidGeneration as error:
            raise self._name_param(error) from error
        return None

    async def check(self) -> dict[str, int]:
        """Return the tokens of the prompts; raise as if the request were to be answered."""
        generations = self._request.generations[:: self._request.profile.choices]
        try:
            tokens = [await self._worker.engine.check(one) for one in generations]
        except types.InvalidGeneration as error:
            raise self._name_param(error) from error
        return {"prompt_tokens": sum(tokens)}

    async def _complete(self) -> Json:
        async with aclosing(self._events()) as events:
            async for index, event in events:
                if not isinstance(event, types.PrefillProgress):
                    self._entries(index, event)
        choices = [one.build() for one in self._writers]
        return self._envelope(choices, whole=True) | self._totals()

    async def _stream(self, send: Send) -> None:
        stream = EventStream(send, self._request.request_id, self._waiting)
        with stream.kept_alive(self._worker.keepalive_s):
            async with aclosing(self._events()) as events:
                try:
                    await self._relay(events, stream)
                except ClientStalled:
                    raise
                except Exception as error:
                    if not stream.started:
                        raise
                    failure = as_request_error(error, self._request.request_id)
                    await stream.send(_encode_event(failure.body()), last=True)

    def _waiting(self) -> bytes:
        """Return the comment of a stream that has not begun: its place in the queue, if it waits.

        The choices of a request wait one after another; the first one's place is the next event's.
        """
        place = self._worker.engine.queue_place(self._request.generations[0])
        return _WAITING if place is None else place.comment()

    async def _relay(
        self, events: AsyncIterator[tuple[int, types.Event]], stream: EventStream
    ) -> None:
        """Send the events as chunks, up to `[DONE]`."""
        begun = False
        async for index, event in events:
            if isinstance(event, types.PrefillProgress):
                comment = b": read %d of %d tokens of the prompt\n\n" % (
                    event.read_tokens,
                    event.prompt_tokens,
                )
                stream.comment = partial(bytes, comment)
                await stream.start()
                continue
            if not begun:
                begun, stream.comment = True, partial(bytes, _KEEPALIVE)
                if isinstance(event, types.Delta) and event.usage.skipped_tokens:
                    # Another worker would read all of the prompt, and so go on with another answer.
                    self._progress = None
                begin = [entry for writer in self._writers for entry in writer.begin()]
                if begin and not self._request.given:
                    assert not isinstance(event, types.PromptScored), "its echo comes first"
                    usage = replace(event.usage, completion_tokens=0, reasoning_tokens=0)
                    self._usages[index] = usage
                    await self._send_entries(stream, 0, begin)
            entries = self._new_entries(index, event)
            if entries is not None:
                await self._send_entries(stream, index, entries)
        totals = self._totals()
        if self._request.profile.include_usage:
            await stream.send(_encode_event(self._envelope([]) | totals))
        await stream.send(_DONE, last=True)

    def _new_entries(
        self, index: int, event: types.PromptScored | types.Delta | types.Finished
    ) -> Sequence[Json] | None:
        """Return the entries of an event that the client lacks; None if they come later."""
        entries = self._entries(index, event)
        generation, progress = self._request.generations[index], self._progress
        if isinstance(event, types.Finished):
            if generation.given is not None and generation.given.finished:
                return None
            if progress is not None:
                progress.add(index, (), ended=True)
        elif isinstance(event, types.Delta):
            if event.given:
                return None
            if progress is not None:
                progress.add(index, event.steps)
        held = self._held.pop(index, [])
        if progress is not None and isinstance(event, types.Delta) and event.partial:
            self._held[index] = [*held, *entries]
            return None
        return [*held, *entries]

    async def _send_entries(self, stream: EventStream, index: int, entries: Sequence[Json]) -> None:
        usage = self._running_usage(idle=not entries)
        if not entries and not usage:
            return
        no_usage = {"usage": None} if self._request.profile.include_usage else {}
        # The engine also generates text that it holds back, as it may begin a tool call.
        whole, entries = bool(entries), entries or [self._writers[0].idle()]
        chunks = [self._envelope([entry]) | no_usage | usage for entry in entries]
        events = [event for chunk in chunks for event in _encode_chunk(chunk)]
        if self._progress is not None:
            marked = self._progress.mark(events, index if whole else 0, whole=whole)
            if sum(map(len, marked)) <= _GROUP_LIMIT_BYTES:
                events = marked
            else:  # a gateway keeps so much of a group; the stream cannot go on elsewhere
                self._progress = None
        await stream.send(b"".join(events))

    def _running_usage(self, *, idle: bool) -> dict[str, Json]:
        """Return the usage so far, if enough tokens were read or generated since it was sent."""
        interval = self._request.profile.usage_interval
        tokens = sum(one.prompt_tokens + one.completion_tokens for one in self._usages.values())
        if interval is None or not tokens:
            return {}
        if tokens - self._reported_tokens < max(interval, RUNNING_USAGE_TOKENS * idle):
            return {}
        self._reported_tokens = tokens
        return {"usage": render_usage(self._usages, self._request.profile.choices)}

    def _name_param(self, error: types.InvalidGeneration) -> BadRequest:
        # The engine calls every prompt by the field of a chat.
        completion = self._request.profile.endpoint is Endpoint.COMPLETIONS
        param = "prompt" if completion and error.param == "messages" else error.param
        return BadRequest(error.message, param=param, code=error.code)

    def _entries(
        self, index: int, event: types.PromptScored | types.Delta | types.Finished
    ) -> Sequence[Json]:
        writer = self._writers[index]
        if isinstance(event, types.PromptScored):
            assert isinstance(writer, CompletionChoice), "a chat has no echo"
            self._usages[index] = types.Usage(
                prompt_tokens=len(event.logprobs), completion_tokens=0
            )
            return writer.echo(event.logprobs)
        self._usages[index] = event.usage
        if isinstance(event, types.Delta):
            return writer.add(event)
        self._finished[index] = event
        return writer.finish(event)

    def _totals(self) -> dict[str, Json]:
        """Return the usage and the metrics; raise if the engine has left a choice unfinished."""
        finished = [self._finished[index] for index in range(len(self._writers))]
        metrics = render_metrics(
            finished,
            detailed=self._request.detailed_metrics,
            exact=self._request.profile.exact,
        )
        return {"usage": render_usage(self._usages, self._request.profile.choices), **metrics}

    def _envelope(self, choices: Sequence[Json], *, whole: bool = False) -> dict[str, Json]:
        """Return an answer, or a chunk of one, with these entries of choices."""
        answer, chunk, id_begin = _OBJECTS[self._request.profile.endpoint]
        return {
            "id": id_begin + self._request.request_id,
            "object": answer if whole else chunk,
            "created": self._request.created_s,
            "model": self._request.shown_model,
            "choices": choices,
        }


class EventStream:
    """A response of server-sent events, whose head goes out with its first bytes or before them.

    While it is kept alive, it sends a comment, or the head and a comment, after each interval
    without an event. So no idle limit on the way to the client cuts a working answer.
    """

    def __init__(self, send: Send, request_id: str, comment: Callable[[], bytes]) -> None:
        """Create a stream; `comment` returns a text to send in place of an event."""
        self._send = send
        self._headers = {**_STREAM_HEADERS, "x-request-id": request_id}
        self._sending = asyncio.Lock()
        self._sent_s = asyncio.get_running_loop().time()
        self.started = False
        self.comment = comment

    async def start(self) -> None:
        """Send the head, unless it has been sent: a call that sends nothing delays no comment."""
        if not self.started:
            await self.send(b"")

    async def send(self, events: bytes, *, last: bool = False) -> None:
        """Send bytes; raise `ClientStalled` if the client does not read."""
        async with self._sending:
            self._sent_s = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(WRITE_STALL_S):
                    if not self.started:
                        self.started = True
                        raw = [(a.encode(), b.encode()) for a, b in self._headers.items()]
                        head = {"type": "http.response.start", "status": 200, "headers": raw}
                        await self._send(head)
                    if events or last:
                        body = {"type": "http.response.body", "body": events, "more_body": not last}
                        await self._send(body)
            except TimeoutError as error:
                raise ClientStalled from error

    @contextmanager
    def kept_alive(self, interval_s: float) -> Iterator[None]:
        """Send comments within the context."""
        task = asyncio.create_task(self._keep_alive(interval_s))
        try:
            yield
        finally:
            # Not awaited: after the last byte the server reports a disconnect, which would come
            # before the end of this response.
            task.cancel()

    async def _keep_alive(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ClientStalled):  # the next event raises it too
            while True:
                left_s = self._sent_s + interval_s - loop.time()
                if left_s > 0:
                    await asyncio.sleep(left_s)
                else:
                    await self.send(self.comment())


def _writer(request: CompletionRequest, index: int) -> ChatChoice | CompletionChoice:
    top_logprobs, token_sources = request.profile.top_logprobs, request.profile.token_sources
    if request.profile.endpoint is Endpoint.COMPLETIONS:
        return CompletionChoice(
            index,
            echo=request.echoes[index // request.profile.choices] if request.echoes else "",
            top_logprobs=top_logprobs,
            token_sources=token_sources,
        )
    splitter = None
    if request.tool_format is not None:
        splitter = ToolCallSplitter(request.tool_format, request.tools, request.call_rules)
    return ChatChoice(
        index,
        splitter=splitter,
        logprobs=top_logprobs is not None,
        token_sources=token_sources,
        include_reasoning=request.profile.include_reasoning,
        reasons=request.reasons,
    )


async def events_of(
    generate: Callable[[types.Generation], AsyncGenerator[types.Event, None]],
    generations: Sequence[types.Generation],
) -> AsyncGenerator[tuple[int, types.Event], None]:
    """Yield the events of all choices in order of arrival, each with the index of its choice.

    Closing the generator removes every row; the first error of any choice ends all of them and is
    raised.
    """
    if len(generations) == 1:
        async with aclosing(generate(generations[0])) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, types.Event | Exception | None]] = asyncio.Queue()

    async def collect(index: int, generation: types.Generation) -> None:
        end = None
        try:
            async with aclosing(generate(generation)) as events:
                async for event in events:
                    queue.put_nowait((index, event))
        except Exception as error:  # noqa: BLE001 - queued, and raised by the reader
            end = error
        queue.put_nowait((index, end))

    tasks = [asyncio.create_task(collect(*choice)) for choice in enumerate(generations)]
    try:
        running = len(tasks)
        while running:
            index, outcome = await queue.get()
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is None:
                running -= 1
            else:
                yield index, outcome
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _encode_chunk(chunk: Json) -> list[bytes]:
    """Return the event of a chunk, or several if it is large."""
    event = _encode_event(chunk)
    count = -(-len(event) // _PART_BYTES)
    if len(event) <= EVENT_LIMIT_BYTES:
        return [event]
    parts = split_entry(chunk["choices"][0], count)
    if len(parts) == 1:
        return [event]
    return [event for one in parts for event in _encode_chunk({**chunk, "choices": [one]})]


def _encode_event(payload: Json) -> bytes:
    return f"data: {_ENCODER.encode(payload)}\n\n".encode()
