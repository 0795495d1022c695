"""The answer of a chat as a message: whole, and as the events of a stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway.protocols.base import (
    CUT,
    StreamEncoder,
    arguments_in,
    choice_of,
    encode_event,
    object_in,
    objects_in,
    text_in,
)
from gateway.protocols.event_stream import AnswerReader
from gateway.protocols.messages.request import MessagesChat
from gateway.types import UNUSED, Json

_OF_PROMPT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def message_of(answer: Mapping[str, Any], content: Sequence[Json], breakpoint_in: str) -> Json:
    """Return the message of an answer or of its first chunk, which has not ended."""
    return {
        "id": "msg_" + text_in(answer, "id").removeprefix("chatcmpl-"),
        "type": "message",
        "role": "assistant",
        "model": text_in(answer, "model"),
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage_of(answer, breakpoint_in),
    }


def content_of(choice: Mapping[str, Any], sign: Callable[[str], str] | None) -> Iterator[Json]:
    """Yield the blocks of an answer, without a call that a limit has cut.

    `sign` marks reasoning as ours; None leaves it out.
    """
    message, cut = object_in(choice, "message"), choice.get("finish_reason") in CUT
    if sign is not None and (reasoning := text_in(message, "reasoning_content")):
        yield {"type": "thinking", "thinking": reasoning, "signature": sign(reasoning)}
    if text := text_in(message, "content") + text_in(message, "refusal"):
        yield {"type": "text", "text": text}
    for call in objects_in(message, "tool_calls"):
        function = object_in(call, "function")
        arguments = text_in(function, "arguments")
        if (given := arguments_in(arguments)) is None and cut:
            continue
        if given is None:
            given = {"arguments": arguments}  # the client tells the model what is wrong
        yield {
            "type": "tool_use",
            "id": text_in(call, "id"),
            "name": text_in(function, "name"),
            "input": given,
        }


def stop_of(choice: Mapping[str, Any], *, refused: bool = False) -> Json:
    """Return why an answer ended; a worker names the stop sequence as vLLM does."""
    reason = _STOP_REASONS.get(text_in(choice, "finish_reason"), "end_turn")
    sequence = choice.get("stop_reason")
    if refused:
        reason = "refusal"
    elif reason == "end_turn" and isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": reason, "stop_sequence": None}


def metrics_of(frame: Mapping[str, Any], chat: MessagesChat) -> Json:
    """Return the field with the draft counts of an answer, if the request asks for them."""
    metrics = object_in(frame, "metrics") if chat.body.get("metrics") else {}
    return {"metrics": metrics} if metrics else {}


def _usage_of(answer: Mapping[str, Any], breakpoint_in: str) -> Json:
    """Return the usage; Anthropic counts tokens from a cache apart, and those to a breakpoint."""
    usage = AnswerReader.usage(answer) or UNUSED
    end = {"system": usage.system_tokens, "messages": usage.prompt_tokens}.get(breakpoint_in, 0)
    read, to_end = (max(one - usage.cached_tokens, 0) for one in (usage.prompt_tokens, end))
    written = min(usage.written_tokens, read, to_end)
    counts: Json = {
        "input_tokens": read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


class MessageEncoder(StreamEncoder):
    """Encodes the chunks of a chat as the events of a message, in Anthropic's order."""

    def __init__(self, sign: Callable[[str], str] | None, chat: MessagesChat) -> None:
        """`sign`: as in `content_of`."""
        self._sign = sign
        self._chat = chat
        self._metrics: Json = {}
        self._begun = False
        self._blocks = 0
        self._open = ""
        """The type of the open block."""
        self._reasoning: list[str] = []
        self._refused = False
        self._call: Json = {}
        """A call without arguments yet, which a limit would drop; empty without one."""
        self._stop = stop_of({})
        self._usage = _usage_of({}, chat.breakpoint_in)
        self._prompt: Json = {}
        """The usage of the prompt that the first event has; clients add other numbers to it."""

    def event(self, event: bytes, frame: Json) -> bytes:
        """Return the events of one chunk."""
        if frame.get("usage"):
            self._usage = _usage_of(frame, self._chat.breakpoint_in)
        self._metrics = metrics_of(frame, self._chat) or self._metrics
        choice = choice_of(frame)
        written = b"".join(self._write(object_in(choice, "delta")))
        if choice.get("finish_reason"):
            self._stop = stop_of(choice, refused=self._refused)
        if choice.get("finish_reason") in CUT:
            self._call = {}
        # The first chunk has the role alone, and the next one the usage of the prompt.
        if self._begun or not (written or frame.get("usage") or choice.get("finish_reason")):
            return written
        self._begun = True
        message = message_of(frame, [], self._chat.breakpoint_in)
        prompt = {name: message["usage"][name] for name in _OF_PROMPT}
        self._prompt = prompt if any(prompt.values()) else {}
        return encode_event({"type": "message_start", "message": message}) + written

    def done(self) -> bytes:
        """Return the events that end a message."""
        usage, more = self._usage | self._prompt, self._chat.edits | self._metrics
        end = {"type": "message_delta", "delta": self._stop, "usage": usage, **more}
        return b"".join((*self._close(), encode_event(end), encode_event({"type": "message_stop"})))

    def _write(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        reasoning = text_in(delta, "reasoning_content")
        if reasoning and self._sign is not None:
            yield from self._continue("thinking", {"thinking": "", "signature": ""})
            self._reasoning.append(reasoning)
            yield self._delta({"type": "thinking_delta", "thinking": reasoning})
        refusal = text_in(delta, "refusal")
        self._refused |= bool(refusal)
        if text := text_in(delta, "content") + refusal:
            yield from self._continue("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in objects_in(delta, "tool_calls"):
            function = object_in(call, "function")
            if name := text_in(function, "name"):
                yield from self._close()
                self._call = {"id": text_in(call, "id"), "name": name, "input": {}}
            if arguments := text_in(function, "arguments"):
                yield from self._begin_call()
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _begin_call(self) -> Iterator[bytes]:
        call, self._call = self._call, {}
        if call:
            yield from self._continue("tool_use", call)

    def _continue(self, kind: str, block: Json) -> Iterator[bytes]:
        """Open a block, unless one of this type is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        start = {"index": self._blocks, "content_block": {"type": kind, **block}}
        yield encode_event({"type": "content_block_start", **start})

    def _delta(self, delta: Json) -> bytes:
        return encode_event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        """Close the open block, if there is one."""
        yield from self._begin_call()
        if not self._open:
            return
        if self._open == "thinking" and self._sign is not None:
            signature = self._sign("".join(self._reasoning))
            yield self._delta({"type": "signature_delta", "signature": signature})
            self._reasoning.clear()
        yield encode_event({"type": "content_block_stop", "index": self._blocks})
        self._open = ""
        self._blocks += 1
