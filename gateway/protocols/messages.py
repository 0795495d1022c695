"""Anthropic's Messages: a request becomes a chat, and the answer of the chat a message.

https://docs.anthropic.com/en/api/messages. What a field changes for Anthropic's own service alone,
such as `cache_control`, is accepted and left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from gateway import errors
from gateway.protocols.base import choice_of, has_choices, object_in, objects_in, text_in
from gateway.protocols.context_management import FIELD as CONTEXT_MANAGEMENT
from gateway.protocols.context_management import edit_messages
from gateway.protocols.event_stream import read_usage
from gateway.protocols.openai import CHAT, encode_json, parse
from gateway.protocols.sealing import Sealer
from gateway.routing.select import RoutingRequest
from gateway.routing.view import FleetView
from gateway.types import UNUSED, Header, Headers, Inspected, LimitState
from policies.document import PolicyDocument
from policies.request.fields import FieldError
from policies.request.profile import REASONING_EFFORTS, Endpoint

Json = dict[str, Any]

PATH = "/v1/messages"
_SAME_FIELDS = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_IGNORED_FIELDS = frozenset(
    "metadata service_tier container inference_geo speed cache_control diagnostics billing_policy "
    "fallbacks fallback_credit_token user_profile_id workspace_id".split()
)
"""They choose among Anthropic's services and accounts."""
_FIELDS = _IGNORED_FIELDS.union(
    _SAME_FIELDS,
    "messages system tools tool_choice stop_sequences thinking output_config output_format "
    "context_management mcp_servers thread compaction".split(),
)
# Claude Code writes a digest of each request there, so that no two prompts would begin alike.
_BILLING_MARK = "x-anthropic-billing-header"
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OVERFLOW = re.compile(r"maximum context length is ([0-9]+) tokens.* resulted in ([0-9]+) tokens")
_REASONING = b"thinking "
_BETWEEN_TEXTS = "\n\n"
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "additionalProperties": False,
    "properties": {
        **{name: {} for name in sorted(_FIELDS)},
        "model": {"type": "string", "minLength": 1},
        "max_tokens": {"type": ["integer", "null"], "minimum": 1},
        "stream": {"type": ["boolean", "null"]},
        "system": {"type": ["string", "array", "null"]},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["user", "assistant", "system"]},
                    "content": {"type": ["string", "array"]},
                },
            },
        },
    },
}
"""The JSON Schema of a body; `to_chat` checks what it leaves open."""
ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "description": "Anthropic's shape.",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


class MessagesFormat:
    """One request of `POST /v1/messages`, which any worker serves that serves chats."""

    path = PATH
    endpoint = Endpoint.CHAT

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._chat = MessagesChat({})

    def inspect(self, raw: bytes, policy: PolicyDocument, fleet: FleetView) -> Inspected:
        """Translate a body into a chat, and inspect that; raise a `RequestRefused`."""
        body = parse(raw)
        if body.get("thread") is not None:
            raise errors.ThreadUnserved
        try:
            self._chat = chat = to_chat(body, self._is_ours)
        except FieldError as error:
            raise errors.FieldInvalid(error.message, param=error.param) from None
        if chat.left_out and policy.tools.hosted == "refuse":
            at, _, kind = chat.left_out[0].partition(":")
            raise errors.ToolUnserved(kind, param=f"{at}.type")
        inspected = CHAT.inspect_body(chat.body, policy, fleet)
        ignored = (*(name for name in body if name in _IGNORED_FIELDS), *chat.left_out)
        return inspected._replace(profile=inspected.profile._replace(ignored=ignored))

    def is_complete(self, answer: Mapping[str, Any]) -> bool:
        """Return whether the answer of the chat is whole."""
        return has_choices(answer)

    def encode(self, request: RoutingRequest, answer: Json, body: bytes) -> bytes:  # noqa: ARG002
        """Return the message of a whole answer."""
        choice = choice_of(answer)
        content = [*_content_of(object_in(choice, "message"), self._sign)]
        message = _message_of(answer, content) | _stop_of(choice) | {"usage": _usage_of(answer)}
        return encode_json(message | self._edits())

    def encoder(
        self,
        request: RoutingRequest,  # noqa: ARG002
        late_headers: Sequence[Header] = (),  # noqa: ARG002 - a comment has them
    ) -> MessageEncoder:
        """Return the encoder of a stream."""
        return MessageEncoder(self._sign, self._edits())

    def _edits(self) -> Json:
        """Return the field that lists what was cleared, if the request asks for it."""
        applied = self._chat.applied_edits
        return {} if applied is None else {CONTEXT_MANAGEMENT: {"applied_edits": applied}}

    def _sign(self, reasoning: str) -> str:
        """Return the mark by which reasoning that comes back is known as ours and unchanged."""
        return self._sealer.seal(b"", _REASONING + reasoning.encode())

    def _is_ours(self, reasoning: str, signature: str) -> bool:
        return self._sealer.unseal(signature, _REASONING + reasoning.encode()) is not None

    def response_headers(self, request_id: str) -> Headers:
        """Return the request id under Anthropic's name."""
        return [(b"request-id", request_id.encode())]

    def limit_headers(self, states: Iterable[LimitState], unix_s: float) -> Headers:
        """Return what remains of a client's limits, in Anthropic's headers."""
        headers: Headers = []
        for unit, limit, remaining, full_in_s in states:
            prefix = f"anthropic-ratelimit-{unit}-".encode()
            full_at = datetime.fromtimestamp(unix_s + math.ceil(full_in_s), UTC)
            headers += [
                (prefix + b"limit", b"%d" % limit),
                (prefix + b"remaining", b"%d" % remaining),
                (prefix + b"reset", full_at.strftime("%Y-%m-%dT%H:%M:%SZ").encode()),
            ]
        return headers

    def keep_alive(self, comment: bytes) -> bytes:
        """Return the comment, and the event that Anthropic's clients expect in a pause."""
        return comment + _PING

    def error_body(self, error: errors.GatewayError) -> bytes:
        """Return the body of an error response in Anthropic's shape."""
        return error_body(error)

    def error_event(self, error: errors.GatewayError) -> bytes:
        """Return the last event of a stream that an error ends."""
        return b"event: error\ndata: " + error_body(error) + b"\n\n"


def error_body(error: errors.GatewayError) -> bytes:
    """Return the body of an error response in Anthropic's shape."""
    kind = _ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if error.code == errors.CONTEXT_OVERFLOW:
        # In the words by which Claude Code knows that it must shorten a conversation.
        message = "prompt is too long: it exceeds the context of the model"
        if counts := _OVERFLOW.search(error.message):
            message = f"prompt is too long: {counts[2]} tokens > {counts[1]} maximum"
    shown: Json = {"type": kind, "message": message}
    if isinstance(error, errors.ThreadUnserved):
        shown["details"] = {"error_code": error.code}
    return to_json({"type": "error", "error": shown})


class MessagesChat(NamedTuple):
    """A request for `/v1/chat/completions`."""

    body: Json
    applied_edits: Sequence[Json] | None = None
    """What `context_management` cleared; None if the request has no such field."""
    left_out: tuple[str, ...] = ()
    """The place and the type of each tool that Anthropic's servers alone run."""


def to_chat(body: Mapping[str, Any], is_ours: Callable[[str, str], bool]) -> MessagesChat:
    """Translate a request into a chat; raise `FieldError`.

    `is_ours` tells whether a signature marks reasoning of this gateway's models.
    """
    for name in body:
        if name not in _FIELDS:
            raise FieldError(name[:100], f"{name[:100]}: Extra inputs are not permitted.")
    if body.get("mcp_servers"):
        raise FieldError("mcp_servers", "mcp_servers: This gateway calls no MCP servers.")
    if body.get("compaction") is not None:
        raise FieldError("compaction", "compaction: This gateway compacts no conversations.")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", "messages: A non-empty list is required.")
    applied = None
    if body.get(CONTEXT_MANAGEMENT) is not None:
        messages, applied = edit_messages(body[CONTEXT_MANAGEMENT], messages)
    chat: Json = {name: body[name] for name in _SAME_FIELDS if body.get(name) is not None}
    chat["messages"] = [*_system_of(body.get("system"))]
    for index, message in enumerate(messages):
        chat["messages"] += _messages_of(message, f"messages.{index}", is_ours)
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    tools, left_out = _tools_of(body)
    chat |= tools | _reasoning_of(body) | _form_of(body)
    return MessagesChat(chat, applied, left_out)


def _system_of(system: Any) -> Iterator[Json]:
    if system is None:
        return
    texts = [system] if isinstance(system, str) else _texts_of(system, "system")
    text = _BETWEEN_TEXTS.join(text for text in texts if not text.startswith(_BILLING_MARK))
    if text:
        yield {"role": "system", "content": text}


def _texts_of(blocks: Any, where: str) -> list[str]:
    texts = []
    for at, block in _blocks_of(blocks, where):
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            raise FieldError(at, f"{at}: A text block is required.")
        texts.append(block["text"])
    return texts


def _blocks_of(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each block with its place."""
    if not isinstance(content, list):
        raise FieldError(where, f"{where}: A string or a list of blocks is required.")
    for index, block in enumerate(content):
        at = f"{where}.{index}"
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise FieldError(at, f"{at}: A block with a type is required.")
        yield at, block


def _messages_of(message: Any, where: str, is_ours: Callable[[str, str], bool]) -> Iterator[Json]:
    """Yield the chat messages of one message: each result of a tool is one of its own."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise FieldError(f"{where}.role", f"{where}.role: It must be user, assistant or system.")
    content = message.get("content")
    if isinstance(content, str):
        if content or role != "assistant":
            # A system message in the middle stays at its place: moved to the front, it would
            # change the beginning of the prompt, which is read already.
            yield {"role": "assistant" if role == "assistant" else "user", "content": content}
    elif role == "assistant":
        yield from _assistant_message(content, f"{where}.content", is_ours)
    else:
        yield from _user_messages(content, f"{where}.content")


def _assistant_message(
    content: Any, where: str, is_ours: Callable[[str, str], bool]
) -> Iterator[Json]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Json] = []
    for at, block in _blocks_of(content, where):
        match block["type"]:
            case "text":
                texts.append(_text(block, "text", at))
            case "tool_use":
                function = {
                    "name": _text(block, "name", at),
                    "arguments": encode_json(block.get("input") or {}).decode(),
                }
                calls.append(
                    {"id": _text(block, "id", at), "type": "function", "function": function}
                )
            case "thinking":
                text = _text(block, "thinking", at)
                # Another model's reasoning is none of this one's.
                if is_ours(text, str(block.get("signature"))):
                    reasoning.append(text)
            case "redacted_thinking" | "server_tool_use" | "web_search_tool_result":
                pass  # of Anthropic's own service
            case _:
                raise _unsupported(block, at)
    message: Json = {"role": "assistant", "content": "".join(texts) or None}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if texts or calls:
        yield message


def _user_messages(content: Any, where: str) -> Iterator[Json]:
    parts: list[Json] = []
    for at, block in _blocks_of(content, where):
        if block["type"] != "tool_result":
            parts.append(_part_of(block, at))
            continue
        texts: list[str] = []
        given = block.get("content") or ""
        if isinstance(given, str):
            texts.append(given)
        else:
            for inner_at, inner in _blocks_of(given, f"{at}.content"):
                part = _part_of(inner, inner_at)
                # Templates take pictures from users alone.
                (texts.append(part["text"]) if part["type"] == "text" else parts.append(part))
        text = _BETWEEN_TEXTS.join(texts)
        if block.get("is_error"):
            text = f"Error: {text}"
        yield {"role": "tool", "tool_call_id": _text(block, "tool_use_id", at), "content": text}
    if parts and all(part["type"] == "text" for part in parts):
        yield {"role": "user", "content": _BETWEEN_TEXTS.join(part["text"] for part in parts)}
    elif parts:
        yield {"role": "user", "content": parts}


def _part_of(block: Mapping[str, Any], at: str) -> Json:
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    match block["type"], source.get("type"):
        case "text", _:
            return {"type": "text", "text": _text(block, "text", at)}
        case "image", "base64":
            kind = _text(source, "media_type", f"{at}.source")
            data = _text(source, "data", f"{at}.source")
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case "image", "url":
            url = _text(source, "url", f"{at}.source")
            return {"type": "image_url", "image_url": {"url": url}}
        case "document", "text":
            return {"type": "text", "text": _text(source, "data", f"{at}.source")}
        case _:
            raise _unsupported(block, at)


def _text(block: Mapping[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise FieldError(f"{at}.{name}", f"{at}.{name}: A string is required.")
    return value


def _unsupported(block: Mapping[str, Any], at: str) -> FieldError:
    return FieldError(
        f"{at}.type", f"{at}.type: This gateway does not support '{block['type'][:100]}'."
    )


def _tools_of(body: Mapping[str, Any]) -> tuple[Json, tuple[str, ...]]:
    """Return the tools and the choice among them, and the tools that are left out."""
    tools = body.get("tools") or []
    functions = []
    left_out = []
    for at, tool in _named(tools):
        if tool.get("type") not in (None, "custom"):
            left_out.append(f"{at}:{str(tool['type'])[:100]}")
            continue
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
        function |= {name: tool[name] for name in ("description", "strict") if name in tool}
        functions.append({"type": "function", "function": function})
    chosen: Json = {"tools": functions} if functions else {}
    choice = body.get("tool_choice")
    if choice is not None:
        chosen |= _choice_of(choice, functions)
    return chosen, tuple(left_out)


def _choice_of(choice: Any, functions: Sequence[Json]) -> Json:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    chosen: Json = {}
    if kind == "tool":
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _TOOL_CHOICES:
        chosen["tool_choice"] = _TOOL_CHOICES[kind]
    else:
        raise FieldError(
            "tool_choice.type", "tool_choice.type: It must be auto, any, tool or none."
        )
    if choice.get("disable_parallel_tool_use"):
        chosen["parallel_tool_calls"] = False
    return chosen if functions else {}  # the tools that it chooses among are left out


def _named(tools: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(tools, list):
        raise FieldError("tools", "tools: A list is required.")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise FieldError(f"tools.{index}", f"tools.{index}: A tool with a name is required.")
        yield f"tools.{index}", tool


def _reasoning_of(body: Mapping[str, Any]) -> Json:
    """Translate `thinking` and the effort; without either, a model that may reason does not."""
    effort = _object(body, "output_config").get("effort")
    if effort is not None and effort not in REASONING_EFFORTS:
        raise FieldError(
            "output_config.effort", f"output_config.effort: It must be one of {REASONING_EFFORTS}."
        )
    thinking = _object(body, "thinking")
    hidden: Json = {"include_reasoning": False} if thinking.get("display") == "omitted" else {}
    match thinking.get("type"):
        case None:
            return {"reasoning_effort": effort} if effort else {}
        case "disabled":
            return {"reasoning_effort": "none"}
        case "adaptive":
            return {"reasoning_effort": effort or "high", **hidden}
        case "enabled":
            budget = thinking.get("budget_tokens")
            return {"reasoning_effort": effort or "high", "thinking_budget": budget, **hidden}
    raise FieldError("thinking.type", "thinking.type: It must be enabled, adaptive or disabled.")


def _form_of(body: Mapping[str, Any]) -> Json:
    form = _object(body, "output_config").get("format") or body.get("output_format")
    if form is None:
        return {}
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise FieldError(
            "output_config.format", "output_config.format: Its type must be json_schema."
        )
    schema = {"name": "answer", "strict": True, "schema": form.get("schema")}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FieldError(name, f"{name}: An object is required.")
    return value


def _message_of(answer: Mapping[str, Any], content: Sequence[Json]) -> Json:
    return {
        "id": "msg_" + text_in(answer, "id").removeprefix("chatcmpl-"),
        "type": "message",
        "role": "assistant",
        "model": text_in(answer, "model"),
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage_of(answer),
    }


def _content_of(message: Mapping[str, Any], sign: Callable[[str], str]) -> Iterator[Json]:
    if reasoning := text_in(message, "reasoning_content"):
        yield {"type": "thinking", "thinking": reasoning, "signature": sign(reasoning)}
    if text := text_in(message, "content"):
        yield {"type": "text", "text": text}
    for call in objects_in(message, "tool_calls"):
        function = object_in(call, "function")
        arguments = text_in(function, "arguments")
        try:
            given = from_json(arguments or "{}", allow_inf_nan=False)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            given = {"arguments": arguments}
        yield {
            "type": "tool_use",
            "id": text_in(call, "id"),
            "name": text_in(function, "name"),
            "input": given,
        }


def _stop_of(choice: Mapping[str, Any]) -> Json:
    """Return why an answer ended; a worker names the stop sequence as vLLM does."""
    reason = _STOP_REASONS.get(text_in(choice, "finish_reason"), "end_turn")
    sequence = choice.get("stop_reason")
    if reason == "end_turn" and isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": reason, "stop_sequence": None}


def _usage_of(answer: Mapping[str, Any]) -> Json:
    """Return the usage; Anthropic counts tokens from a cache apart."""
    usage = read_usage(answer) or UNUSED
    read = max(usage.prompt_tokens - usage.cached_tokens, 0)
    written = min(usage.written_tokens, read)
    counts: Json = {
        "input_tokens": read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    details = object_in(object_in(answer, "usage"), "completion_tokens_details")
    reasoning = details.get("reasoning_tokens")
    if isinstance(reasoning, int) and 0 < reasoning <= usage.completion_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": reasoning}
    return counts


class MessageEncoder:
    """Encodes the chunks of a chat as the events of a message, in Anthropic's order."""

    passthrough = False
    failovers = 0

    def __init__(self, sign: Callable[[str], str], edits: Mapping[str, Any]) -> None:
        """`edits`: the fields of the last event that list what was cleared."""
        self._sign = sign
        self._edits = edits
        self._begun = False
        self._blocks = 0
        self._open = ""
        """The type of the open block."""
        self._reasoning: list[str] = []
        self._stop = _stop_of({})
        self._usage: Json = {}

    def event(self, event: bytes, frame: Json) -> bytes:  # noqa: ARG002
        """Return the events of one chunk."""
        if frame.get("usage"):
            self._usage = _usage_of(frame)
        choice = choice_of(frame)
        written = b"".join(self._write(object_in(choice, "delta")))
        if choice.get("finish_reason"):
            self._stop = _stop_of(choice)
        # The first chunk has the role alone, and the next one the usage of the prompt.
        if self._begun or not (written or frame.get("usage") or choice.get("finish_reason")):
            return written
        self._begun = True
        start = {"type": "message_start", "message": _message_of(frame, [])}
        return _event(start) + written

    def done(self) -> bytes:
        """Return the events that end a message."""
        usage = self._usage or _usage_of({})
        end = {"type": "message_delta", "delta": self._stop, "usage": usage, **self._edits}
        return b"".join((*self._close(), _event(end), _event({"type": "message_stop"})))

    def _write(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if reasoning := text_in(delta, "reasoning_content"):
            yield from self._continue("thinking", {"thinking": "", "signature": ""})
            self._reasoning.append(reasoning)
            yield self._delta({"type": "thinking_delta", "thinking": reasoning})
        if text := text_in(delta, "content"):
            yield from self._continue("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in objects_in(delta, "tool_calls"):
            function = object_in(call, "function")
            if name := text_in(function, "name"):
                yield from self._close()
                block = {"id": text_in(call, "id"), "name": name, "input": {}}
                yield from self._continue("tool_use", block)
            if arguments := text_in(function, "arguments"):
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _continue(self, kind: str, block: Json) -> Iterator[bytes]:
        """Open a block, unless one of this type is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        start = {"index": self._blocks, "content_block": {"type": kind, **block}}
        yield _event({"type": "content_block_start", **start})

    def _delta(self, delta: Json) -> bytes:
        return _event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        """Close the open block, if there is one."""
        if not self._open:
            return
        if self._open == "thinking":
            signature = self._sign("".join(self._reasoning))
            yield self._delta({"type": "signature_delta", "signature": signature})
            self._reasoning.clear()
        yield _event({"type": "content_block_stop", "index": self._blocks})
        self._open = ""
        self._blocks += 1


def _event(fields: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), to_json(fields))
