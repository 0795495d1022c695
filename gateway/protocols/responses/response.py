"""The answer of a chat as a response: its items and its events."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from gateway import errors
from gateway.protocols.base import (
    AnswerMalformed,
    StreamEncoder,
    arguments_in,
    choice_of,
    encode_events,
    object_in,
    objects_in,
    text_in,
)
from gateway.protocols.event_stream import AnswerReader
from gateway.protocols.responses.items import ITEMS
from gateway.protocols.responses.request import UNNAMED, ResponsesRequest
from gateway.protocols.responses.tools import custom_input
from gateway.types import Inspected, Json

Event = Json
_REPEATED = (
    "instructions max_output_tokens max_tool_calls prompt_cache_key safety_identifier user".split()
)
"""Fields of the request that its response repeats as they are."""
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseBuilder(StreamEncoder):
    """One response, from its request to its end; each step yields its events.

    The last event is left to the exchange: it must come after the response is kept. `response_id`
    begins with `resp_`; `now_s` returns seconds since 1970; `seal` seals reasoning.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        response_id: str,
        inspected: Inspected,
        *,
        seal: Callable[[str], str],
        now_s: Callable[[], float],
    ) -> None:
        self._request = request
        self._metrics = inspected.profile.metrics
        self._seal = seal
        self._now_s = now_s
        self._stem = response_id.removeprefix("resp_")
        self.response = _response_of(request, response_id, inspected, int(now_s()))
        self._numbers = count()
        self.begun = False
        self._unsent: list[Event] = []
        """Events of a chunk whose rest is malformed; the client gets them before the error."""
        self._items: list[Json] = self.response["output"]
        self._open: _OpenItem | None = None
        """The open item."""
        self._sealed: dict[str, str] = {}
        """The sealed reasoning by the id of its item."""
        self._finish_reason = ""

    @property
    def ended(self) -> bool:
        """Return whether the response has its last status."""
        return self.response["status"] not in ("queued", "in_progress")

    def begin(self, *, queued: bool = False) -> Iterator[Event]:
        """Begin the response, if it has not begun."""
        if self.begun:
            return
        self.begun = True
        if queued:
            self.response["status"] = "queued"
        yield self._whole("created")
        if queued:
            yield self._whole("queued")
            self.response["status"] = "in_progress"
        yield self._whole("in_progress")

    def keep_alive(self, comment: bytes) -> bytes:
        """Return a comment, and an event with the status, which may come many times.

        A log of events needs neither.
        """
        if self._request.background:
            return comment
        events: Iterable[Event] = [self._whole("in_progress")] if self.begun else self.begin()
        return comment + encode_events(events)

    def read(self, frame: Mapping[str, Any], message: Mapping[str, Any]) -> Iterator[Event]:
        """Add a chunk of a chat, and its additions to the message."""
        yield from self.begin()
        if usage := _usage_of(frame):
            self.response["usage"] = usage
        if self._metrics and (metrics := object_in(frame, "metrics")):
            self.response["metrics"] = metrics
        choice = choice_of(frame)
        if reasoning := text_in(message, "reasoning_content"):
            yield from self._continue("reasoning", reasoning)
        logprobs = objects_in(object_in(choice, "logprobs"), "content")
        if text := text_in(message, "content"):
            yield from self._continue("message", text, logprobs)
        if refusal := text_in(message, _REFUSAL):
            yield from self._continue(_REFUSAL, refusal)
        for call in objects_in(message, "tool_calls"):
            yield from self._read_call(call)
        self._finish_reason = text_in(choice, "finish_reason") or self._finish_reason

    def event(self, event: bytes, frame: Json) -> bytes:
        """Return the events of one chunk."""
        for one in self.read(frame, object_in(choice_of(frame), "delta")):
            self._unsent.append(one)  # a malformed rest leaves them to `fail`
        encoded = encode_events(self._unsent)
        self._unsent.clear()
        return encoded

    def done(self) -> bytes:
        """Return the events that end the items of a response."""
        return encode_events(self.close())

    def close(self) -> Iterator[Event]:
        """End the items, and set the last status; `final` is its event."""
        yield from self.begin()
        reason = _INCOMPLETE.get(self._finish_reason)
        yield from self._close_item("incomplete" if reason else "completed")
        self.response["status"] = "incomplete" if reason else "completed"
        if reason:
            self.response["incomplete_details"] = {"reason": reason}
        else:
            self.response["completed_at"] = int(self._now_s())

    def final(self) -> Event:
        """Return the last event, which has the whole response."""
        return self._whole(self.response["status"])

    def fail(self, error: errors.GatewayError) -> Iterator[Event]:
        """End the response with an error."""
        yield from self._unsent
        self._unsent.clear()
        yield from self.begin()
        self._cut()
        # OpenAI documents the flat fields; its server, like Open Responses, sends the object.
        flat = {"code": error.code, "message": error.message, "param": error.param}
        yield self._event("error", **flat, **error.body())
        self.response["status"] = "failed"
        self.response["error"] = {"code": _failure_code(error), "message": error.message}
        yield self.final()

    def cancel(self) -> None:
        """End the response without an event, since its client cancels it."""
        self._cut()
        self.response["status"] = "cancelled"

    def drop(self) -> None:
        """Drop the request and the output of a response that has ended."""
        self._request = self._request._replace(items=(), body={})
        self._open = None
        self._items.clear()
        self._sealed.clear()

    def kept_output(self) -> list[Json]:
        """Return the output with the reasoning in its sealed form, as the gateway keeps it."""
        sealed = self._sealed
        return [
            {**item, "encrypted_content": sealed[item["id"]]} if item["id"] in sealed else item
            for item in self._items
        ]

    def _whole(self, kind: str) -> Event:
        response = {**self.response, "output": [*self._items]}
        return self._event(f"response.{kind}", response=response)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _cut(self) -> None:
        """End the open item as it is, without an event."""
        numbers, self._numbers = self._numbers, count()
        for _ in self._close_item("incomplete"):
            pass
        self._numbers = numbers

    def _continue(self, kind: str, piece: str, logprobs: Any = ()) -> Iterator[Event]:
        """Add text to the open item, if it is of this kind, else to a new one."""
        if self._open is None or self._open.kind is not self._row(kind):
            yield from self._close_item("completed")
            yield from self._begin_item(kind)
        assert self._open is not None
        yield from self._open.add(piece, logprobs)

    def _read_call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        """Add a call, or a piece of the last one: `EngineAnswer` ensures their order."""
        function = object_in(call, "function")
        if name := text_in(function, "name"):
            yield from self._close_item("completed")
            origin = self._request.tools.origin(name)
            fields = {"call_id": text_in(call, "id")}
            if origin.kind != "tool_search_call":
                fields["name"] = origin.name
            if origin.namespace:
                fields["namespace"] = origin.namespace
            yield from self._begin_item(origin.kind, **fields)
        if self._open is None:
            raise AnswerMalformed("tool_calls")
        if arguments := text_in(function, "arguments"):
            yield from self._open.add(arguments, ())

    def _row(self, kind: str) -> "_ItemKind":
        summarised = kind == "reasoning" and self._request.summarised
        return _ITEMS[_SUMMARY if summarised else kind]

    def _begin_item(self, kind: str, **fields: Any) -> Iterator[Event]:
        index, row = len(self._items), self._row(kind)
        kind = "message" if kind == _REFUSAL else kind
        item = {
            "id": f"{ITEMS[kind][0]}_{self._stem}{index:04x}",
            "type": kind,
            **fields,
            **row.initial,
        }
        if kind == "reasoning" and self._request.encrypted:
            item["encrypted_content"] = ""
        self._items.append(item)
        self._open = _OpenItem(row, item, index, self._event)
        yield from self._open.begin()

    def _close_item(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return
        if opened.item["type"] == "reasoning":
            self._sealed[opened.item["id"]] = sealed = self._seal(opened.text)
            if self._request.encrypted:
                opened.item["encrypted_content"] = sealed
        yield from opened.end(status)


class _ItemKind(NamedTuple):
    """How the items of one type come."""

    field: str
    """The field of the item that gets its text."""
    initial: Json
    texts: str = ""
    """The name of the events of its text; empty without any."""
    part: str = ""
    """The type of its one part; empty without one."""
    key: str = "text"
    """The field of its part that has the text."""
    read: Callable[[str], Any] = str
    """Returns the value of the field."""

    @property
    def is_call(self) -> bool:
        """Return whether the item calls a tool."""
        return not self.part

    @property
    def place(self) -> Json:
        """Return the fields of events that name the part."""
        return {f"{self.field}_index": 0} if self.part else {}

    @property
    def parts(self) -> str:
        """Return how the events of its part are named."""
        return "content_part" if self.field == "content" else f"reasoning_{self.field}_part"


def _search_arguments(text: str) -> Any:
    given = arguments_in(text)
    return text if given is None else given  # the client tells the model what is wrong


_BEGUN = {"status": "in_progress"}
_SPOKEN = {**_BEGUN, "role": "assistant", "content": []}
_SUMMARY, _REFUSAL = "summary", "refusal"
_THOUGHT = {**_BEGUN, _SUMMARY: []}
_ITEMS: Mapping[str, _ItemKind] = {
    "message": _ItemKind("content", _SPOKEN, texts="output_text", part="output_text"),
    _REFUSAL: _ItemKind("content", _SPOKEN, texts=_REFUSAL, part=_REFUSAL, key=_REFUSAL),
    "reasoning": _ItemKind("content", _THOUGHT, texts="reasoning_text", part="reasoning_text"),
    _SUMMARY: _ItemKind(_SUMMARY, _THOUGHT, texts="reasoning_summary_text", part="summary_text"),
    "function_call": _ItemKind(
        "arguments", {**_BEGUN, "arguments": ""}, texts="function_call_arguments"
    ),
    # The text of a custom tool is known once the arguments around it are whole.
    "custom_tool_call": _ItemKind(
        "input", {"input": ""}, texts="custom_tool_call_input", read=custom_input
    ),
    "tool_search_call": _ItemKind(
        "arguments", {**_BEGUN, "execution": "client", "arguments": {}}, read=_search_arguments
    ),
}
"""By their types; reasoning comes as its summary if the request asks for one, and a refusal as a
message of its own."""


@dataclass(slots=True)
class _OpenItem:
    """An item that is still open."""

    kind: _ItemKind
    item: Json
    _index: int
    _event: Callable[..., Event]
    _pieces: list[str] = field(default_factory=list)
    _logprobs: list[Json] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def begin(self) -> Iterator[Event]:
        """Yield the events of a new item."""
        yield self._whole("added")
        if self.kind.part:
            yield self._of_part("added", self._part(""))

    def add(self, piece: str, logprobs: Sequence[Json]) -> Iterator[Event]:
        """Yield the events of more text."""
        read = [_logprob_of(one) for one in logprobs]
        self._pieces.append(piece)
        self._logprobs += read
        if self.kind.texts and self.kind.read is not custom_input:
            yield self._of_text("delta", read, delta=piece)

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events of the end of the item, which is written into it."""
        kind = self.kind
        if kind.is_call and arguments_in(self.text) is not None:
            status = "completed"  # the limit came behind it
        value = kind.read(self.text)
        if kind.read is custom_input and value:
            yield self._of_text("delta", (), delta=value)
        if kind.texts:
            name = kind.key if kind.part else kind.field
            yield self._of_text("done", self._logprobs, **{name: value})
        if kind.part:
            value = [self._part(value)]
            yield self._of_part("done", value[0])
        self.item[kind.field] = value
        if "status" in self.item:
            self.item["status"] = status
        yield self._whole("done")

    def _part(self, text: str) -> Json:
        more = {"annotations": [], "logprobs": [*self._logprobs]} if self._is_message else {}
        return {"type": self.kind.part, self.kind.key: text, **more}

    @property
    def _is_message(self) -> bool:
        return self.kind is _ITEMS["message"]

    def _of_text(self, kind: str, logprobs: Sequence[Json], **fields: Any) -> Event:
        if self._is_message:
            fields["logprobs"] = logprobs
        return self._about(f"{self.kind.texts}.{kind}", **self.kind.place, **fields)

    def _of_part(self, kind: str, part: Json) -> Event:
        return self._about(f"{self.kind.parts}.{kind}", **self.kind.place, part=part)

    def _about(self, kind: str, **fields: Any) -> Event:
        own = {"item_id": self.item["id"], "output_index": self._index}
        return self._event(f"response.{kind}", **own, **fields)

    def _whole(self, kind: str) -> Event:
        fields = {"output_index": self._index, "item": {**self.item}}
        return self._event(f"response.output_item.{kind}", **fields)


def _response_of(
    request: ResponsesRequest, response_id: str, inspected: Inspected, now_s: int
) -> Json:
    """Return a response without output, which repeats its request as OpenAI does."""
    body, sampling = request.body, inspected.profile.sampling
    reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
    conversation = {"id": request.conversation_id} if request.conversation_id else None
    formatted = {"format": _whole(text.get("format") or {"type": "text"}, "json_schema")}
    return {
        "id": response_id,
        "object": "response",
        "created_at": now_s,
        "status": "in_progress",
        "background": request.background,
        "completed_at": None,
        "conversation": conversation,
        "error": None,
        "incomplete_details": None,
        **{name: body.get(name) for name in _REPEATED},
        "metadata": body.get("metadata") or {},
        "model": inspected.asked_model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": request.previous_id or None,
        "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
        "service_tier": "default",
        "store": request.store,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "temperature": sampling.temperature,
        "text": {**formatted, "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": _whole(body.get("tool_choice") or "auto", "allowed_tools"),
        "tools": [_whole(tool, "function") for tool in request.tools.declared],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": sampling.top_p,
        "truncation": body.get("truncation") or "disabled",
        "usage": None,
    }


_REQUIRED: Mapping[str, Json] = {
    "json_schema": {"name": UNNAMED, "description": None, "strict": False},
    "allowed_tools": {"mode": "auto"},
    "function": {"description": None, "parameters": None, "strict": None},
}


def _whole(given: Any, kind: str) -> Any:
    """Return an object of this type of a request with all that the type requires."""
    if not isinstance(given, Mapping) or given["type"] != kind:
        return given
    return _REQUIRED[kind] | {name: value for name, value in given.items() if value is not None}


def _usage_of(frame: Mapping[str, Any]) -> Json | None:
    usage = AnswerReader.usage(frame)
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.written_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _failure_code(error: errors.GatewayError) -> str:
    """Return one of the codes of failed responses; clients know the overflow by its own."""
    if error.code == errors.CONTEXT_OVERFLOW:
        return errors.CONTEXT_OVERFLOW
    if error.status == errors.LimitReached.status:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"


def _logprob_of(given: Mapping[str, Any]) -> Json:
    top = [_bare_logprob(one) for one in objects_in(given, "top_logprobs")]
    return {**_bare_logprob(given), "top_logprobs": top}


def _bare_logprob(given: Mapping[str, Any]) -> Json:
    token, logprob = text_in(given, "token"), given.get("logprob") or 0.0
    spelled = given.get("bytes") or list(token.encode())
    finite = isinstance(logprob, int | float) and abs(logprob) <= sys.float_info.max
    if not finite or not isinstance(spelled, list):
        raise AnswerMalformed("logprobs")
    return {"token": token, "bytes": spelled, "logprob": float(logprob)}
