"""The answer of a chat as a response: its items, and the events by which they come."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from gateway import errors
from gateway.protocols.base import AnswerMalformed, choice_of, object_in, objects_in, text_in
from gateway.protocols.event_stream import read_usage
from gateway.protocols.responses.request import ResponsesRequest
from gateway.protocols.responses.tools import custom_input
from gateway.strict_json import encode_json
from paceline.request.profile import Sampling

Json = dict[str, Any]
Event = Json

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}


class ResponseBuilder:
    """One response, from its request to its end; each step yields the events that tell of it.

    `response_id` begins with `resp_`; `now_s` returns seconds since 1970; `seal` seals reasoning.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        response_id: str,
        model: str,
        sampling: Sampling,
        *,
        seal: Callable[[str], str],
        now_s: Callable[[], float],
    ) -> None:
        self._request = request
        self._seal = seal
        self._now_s = now_s
        self._stem = response_id.removeprefix("resp_")
        self.response = _response_of(request, response_id, model, sampling, int(now_s()))
        self.sequence = 0
        """The number of the next event."""
        self.begun = False
        self.unsent: list[Event] = []
        """Events of a chunk whose rest is malformed; the client gets them before the error."""
        self._items: list[Json] = self.response["output"]
        self._open: _OpenItem | None = None
        """The item to which more may come."""
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
            yield self._event("response.created", response=self._copy())
            yield self._event("response.queued", response=self._copy())
            self.response["status"] = "in_progress"
        else:
            yield self._event("response.created", response=self._copy())
        yield self._in_progress()

    def keep_alive(self, comment: bytes) -> bytes:
        """Return a comment, and an event that tells the status, which may come many times.

        A log of events needs neither.
        """
        if self._request.background:
            return comment
        events: Iterable[Event] = [self._in_progress()] if self.begun else self.begin()
        return comment + b"".join(map(encode_event, events))

    def _in_progress(self) -> Event:
        return self._event("response.in_progress", response=self._copy())

    def read(self, frame: Mapping[str, Any], message: Mapping[str, Any]) -> Iterator[Event]:
        """Take a chunk of a chat, and what it adds to the message."""
        yield from self.begin()
        if usage := _usage_of(frame):
            self.response["usage"] = usage
        choice = choice_of(frame)
        if reasoning := text_in(message, "reasoning_content"):
            yield from self._continue("reasoning", reasoning)
        logprobs = objects_in(object_in(choice, "logprobs"), "content")
        if text := text_in(message, "content"):
            yield from self._continue("message", text, logprobs)
        for call in objects_in(message, "tool_calls"):
            yield from self._read_call(call)
        self._finish_reason = text_in(choice, "finish_reason") or self._finish_reason

    def close(self) -> Iterator[Event]:
        """End the items, and set the last status; `final` is the event that tells it."""
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
        return self._event(f"response.{self.response['status']}", response=self._copy())

    def fail(self, error: errors.GatewayError) -> Iterator[Event]:
        """End the response with an error."""
        yield from self.unsent
        self.unsent.clear()
        yield from self.begin()
        yield self._event("error", code=error.code, message=error.message, param=error.param)
        self.response["status"] = "failed"
        self.response["error"] = {"code": _failure_code(error), "message": error.message}
        yield self.final()

    def cancel(self) -> None:
        """End the response, since its client cancels it; no event tells it."""
        for _ in self._close_item("incomplete"):
            pass  # nobody follows them
        self.response["status"] = "cancelled"

    def drop(self) -> None:
        """Drop the request and the output of a response that has ended."""
        self._request = self._request._replace(items=(), body={})
        self._open = None
        self._items.clear()
        self._sealed.clear()

    def kept_output(self) -> list[Json]:
        """Return the output with the reasoning in its sealed form, as the gateway keeps it."""
        return [
            {**item, "encrypted_content": self._sealed[item["id"]]}
            if item["id"] in self._sealed
            else item
            for item in self._items
        ]

    def _copy(self) -> Json:
        return {**self.response, "output": list(self._items)}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return event

    def _continue(self, kind: str, piece: str, logprobs: Any = ()) -> Iterator[Event]:
        """Add text to the open item, if it is of this kind, else to a new one."""
        if self._open is None or self._open.item["type"] != kind:
            yield from self._close_item("completed")
            yield from self._begin_item(kind)
        assert self._open is not None
        yield from self._open.add(piece, logprobs)

    def _read_call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        """Take a call, or what continues the last one: `EngineAnswer` sees to their order."""
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

    def _begin_item(self, kind: str, **fields: Any) -> Iterator[Event]:
        index = len(self._items)
        item = {"id": f"{_PREFIXES[kind]}_{self._stem}{index:04x}", "type": kind, **fields}
        self._items.append(item)
        self._open = _ITEMS[kind](self._event, item, index, self._request)
        yield from self._open.begin()

    def _close_item(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return
        if opened.item["type"] == "reasoning":
            self._sealed[opened.item["id"]] = self._seal(opened.text)
        yield from opened.end(status, self._seal)


class _OpenItem(ABC):
    """An item to which more may come."""

    def __init__(
        self, event: Callable[..., Event], item: Json, index: int, request: ResponsesRequest
    ) -> None:
        self._make_event = event
        self.item = item
        self.index = index
        self.request = request
        self.pieces: list[str] = []
        self.logprobs: list[Json] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Yield the events of a new item."""

    @abstractmethod
    def add(self, piece: str, logprobs: Any) -> Iterator[Event]:
        """Yield the events of more text."""

    @abstractmethod
    def end(self, status: str, seal: Callable[[str], str]) -> Iterator[Event]:
        """Yield the events of the end of the item."""

    def event(self, kind: str, **fields: Any) -> Event:
        """Return an event about this item."""
        own = {"item_id": self.item["id"], "output_index": self.index}
        return self._make_event(f"response.{kind}", **own, **fields)

    def added(self) -> Event:
        """Return the event of the new item."""
        fields = {"output_index": self.index, "item": {**self.item}}
        return self._make_event("response.output_item.added", **fields)

    def ended(self) -> Event:
        """Return the event of the item's end."""
        fields = {"output_index": self.index, "item": {**self.item}}
        return self._make_event("response.output_item.done", **fields)


class _OpenMessage(_OpenItem):
    def begin(self) -> Iterator[Event]:
        self.item |= {"status": "in_progress", "role": "assistant", "content": []}
        yield self.added()
        yield self.event("content_part.added", content_index=0, part=_output_text("", []))

    def add(self, piece: str, logprobs: Any) -> Iterator[Event]:
        self.pieces.append(piece)
        read = [_logprob_of(one) for one in logprobs]
        self.logprobs += read
        brief = [_brief_logprob(one) for one in read]
        yield self.event("output_text.delta", content_index=0, delta=piece, logprobs=brief)

    def end(self, status: str, seal: Callable[[str], str]) -> Iterator[Event]:  # noqa: ARG002
        text, brief = self.text, [_brief_logprob(one) for one in self.logprobs]
        yield self.event("output_text.done", content_index=0, text=text, logprobs=brief)
        part = _output_text(text, self.logprobs)
        yield self.event("content_part.done", content_index=0, part=part)
        self.item |= {"status": status, "content": [part]}
        yield self.ended()


class _OpenReasoning(_OpenItem):
    """Reasoning, as its own text, or as the summary for which the request asks."""

    def begin(self) -> Iterator[Event]:
        self.item |= {"summary": []}
        if self.request.encrypted:
            self.item["encrypted_content"] = ""
        yield self.added()
        if self.request.summarised:
            yield self.event("reasoning_summary_part.added", summary_index=0, part=_summary(""))
        else:
            yield self.event("content_part.added", content_index=0, part=_reasoning_text(""))

    def add(self, piece: str, logprobs: Any) -> Iterator[Event]:  # noqa: ARG002
        self.pieces.append(piece)
        if self.request.summarised:
            yield self.event("reasoning_summary_text.delta", summary_index=0, delta=piece)
        else:
            yield self.event("reasoning_text.delta", content_index=0, delta=piece)

    def end(self, status: str, seal: Callable[[str], str]) -> Iterator[Event]:  # noqa: ARG002
        text = self.text
        if self.request.summarised:
            yield self.event("reasoning_summary_text.done", summary_index=0, text=text)
            part = _summary(text)
            yield self.event("reasoning_summary_part.done", summary_index=0, part=part)
            self.item["summary"] = [part]
        else:
            yield self.event("reasoning_text.done", content_index=0, text=text)
            part = _reasoning_text(text)
            yield self.event("content_part.done", content_index=0, part=part)
            self.item["content"] = [part]
        if self.request.encrypted:
            self.item["encrypted_content"] = seal(text)
        yield self.ended()


class _OpenFunctionCall(_OpenItem):
    def begin(self) -> Iterator[Event]:
        self.item |= {"arguments": "", "status": "in_progress"}
        yield self.added()

    def add(self, piece: str, logprobs: Any) -> Iterator[Event]:  # noqa: ARG002
        self.pieces.append(piece)
        yield self.event("function_call_arguments.delta", delta=piece)

    def end(self, status: str, seal: Callable[[str], str]) -> Iterator[Event]:  # noqa: ARG002
        arguments = self.text or "{}"
        yield self.event("function_call_arguments.done", arguments=arguments)
        self.item |= {"arguments": arguments, "status": status}
        yield self.ended()


class _OpenCustomCall(_OpenFunctionCall):
    """The call of a custom tool, whose text is known once the arguments around it are whole."""

    def begin(self) -> Iterator[Event]:
        self.item["input"] = ""
        yield self.added()

    def add(self, piece: str, logprobs: Any) -> Iterator[Event]:  # noqa: ARG002
        self.pieces.append(piece)
        yield from ()

    def end(self, status: str, seal: Callable[[str], str]) -> Iterator[Event]:  # noqa: ARG002
        self.item["input"] = text = custom_input(self.text)
        if text:
            yield self.event("custom_tool_call_input.delta", delta=text)
        yield self.event("custom_tool_call_input.done", input=text)
        yield self.ended()


class _OpenSearch(_OpenCustomCall):
    """The call of a search for tools, whose arguments are an object."""

    def begin(self) -> Iterator[Event]:
        self.item |= {"execution": "client", "arguments": {}, "status": "in_progress"}
        yield self.added()

    def end(self, status: str, seal: Callable[[str], str]) -> Iterator[Event]:  # noqa: ARG002
        try:
            arguments = from_json(self.text or "{}")
        except ValueError:
            arguments = self.text  # the client tells the model what is wrong
        self.item |= {"arguments": arguments, "status": status}
        yield self.ended()


_ITEMS: Mapping[str, type[_OpenItem]] = {
    "message": _OpenMessage,
    "reasoning": _OpenReasoning,
    "function_call": _OpenFunctionCall,
    "custom_tool_call": _OpenCustomCall,
    "tool_search_call": _OpenSearch,
}


class ResponseEncoder:
    """Encodes the chunks of a chat as the events of a response.

    The last event is left to the exchange: it must come after the response is kept.
    """

    passthrough = False
    failovers = 0

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder

    def event(self, event: bytes, frame: Json) -> bytes:  # noqa: ARG002
        """Return the events of one chunk."""
        delta = object_in(choice_of(frame), "delta")
        events = self._builder.unsent
        for one in self._builder.read(frame, delta):
            events.append(one)  # a malformed rest leaves them to `fail`
        encoded = b"".join(map(encode_event, events))
        events.clear()
        return encoded

    def done(self) -> bytes:
        """Return the events that end the items of a response."""
        return b"".join(map(encode_event, self._builder.close()))


def encode_event(fields: Event) -> bytes:
    """Return an event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), encode_json(fields))


def _response_of(
    request: ResponsesRequest, response_id: str, model: str, sampling: Sampling, now_s: int
) -> Json:
    """Return a response without output, which repeats its request as OpenAI does."""
    body = request.body
    reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
    conversation = {"id": request.conversation_id} if request.conversation_id else None
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
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": request.previous_id or None,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": request.store,
        "temperature": sampling.temperature,
        "text": {
            "format": text.get("format") or {"type": "text"},
            "verbosity": text.get("verbosity") or "medium",
        },
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": list(request.tools.declared),
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": sampling.top_p,
        "truncation": body.get("truncation") or "disabled",
        "usage": None,
        "user": body.get("user"),
    }


def _usage_of(frame: Mapping[str, Any]) -> Json | None:
    usage = read_usage(frame)
    if usage is None:
        return None
    prompt, completion, cached, _, written = usage
    made = object_in(object_in(frame, "usage"), "completion_tokens_details")
    reasoning = made.get("reasoning_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": completion,
        "output_tokens_details": {
            "reasoning_tokens": min(reasoning, completion) if type(reasoning) is int else 0
        },
        "total_tokens": prompt + completion,
    }


def _failure_code(error: errors.GatewayError) -> str:
    """Return one of the codes of failed responses; clients know the overflow by its own."""
    if error.code == errors.CONTEXT_OVERFLOW:
        return errors.CONTEXT_OVERFLOW
    if error.status == errors.LimitReached.status:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"


def _output_text(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def _summary(text: str) -> Json:
    return {"type": "summary_text", "text": text}


def _reasoning_text(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _logprob_of(given: Mapping[str, Any]) -> Json:
    top = [_bare_logprob(one) for one in objects_in(given, "top_logprobs")]
    return {**_bare_logprob(given), "top_logprobs": top}


def _bare_logprob(given: Mapping[str, Any]) -> Json:
    token, logprob = text_in(given, "token"), given.get("logprob") or 0.0
    spelled = given.get("bytes") or list(token.encode())
    if not isinstance(logprob, int | float) or not isinstance(spelled, list):
        raise AnswerMalformed("logprobs")
    if abs(logprob) > sys.float_info.max:
        raise AnswerMalformed("logprobs")
    return {"token": token, "bytes": spelled, "logprob": float(logprob)}


def _brief_logprob(given: Json) -> Json:
    """Return a log-probability as events have it, without bytes."""
    top = [{k: one[k] for k in ("token", "logprob")} for one in given["top_logprobs"]]
    return {"token": given["token"], "logprob": given["logprob"], "top_logprobs": top}
