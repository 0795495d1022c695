"""A Responses request: read from its body, and translated into a chat.

https://platform.openai.com/docs/api-reference/responses. What a field changes for OpenAI's own
service alone, such as `service_tier`, is accepted and left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.protocols.documents import (
    Document,
    DocumentUnreadable,
    Readable,
    pdf_of,
    pdfs_in,
    words_for_pdf,
)
from gateway.protocols.history import named, unreadable_pdf, words_for
from gateway.protocols.responses.tools import (
    TextGrammar,
    ToolSet,
    custom_arguments,
    flat_name,
    found_names,
    kind_of,
    read_tools,
)
from gateway.strict_json import ITEMS_LIMIT, encode_text
from paceline.request.constraint import TOOL_GRAMMARS
from paceline.request.fields import CACHE_SALT, FieldError, Fields
from paceline.request.profile import REASONING_EFFORTS

Json = dict[str, Any]
Item = Mapping[str, Any]

_SAME_FIELDS = ("model", "temperature", "top_p", "stream", CACHE_SALT)
_IGNORED_FIELDS = frozenset(
    "user safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention "
    "service_tier client_metadata stream_options context_management image access_programs "
    "max_tool_calls".split()
)
"""They choose among OpenAI's services, or limit tools that run on its servers."""
_REFUSED_FIELDS = frozenset(("prompt", "moderation"))
FIELDS = _IGNORED_FIELDS.union(
    _SAME_FIELDS,
    _REFUSED_FIELDS,
    "background conversation include input instructions max_output_tokens metadata "
    "parallel_tool_calls previous_response_id reasoning store text tool_choice tools "
    "top_logprobs truncation".split(),
)
"""The fields of a body."""
ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(
    "file_search_call.results web_search_call.results web_search_call.action.sources "
    "message.input_image.image_url computer_call_output.output.image_url "
    "code_interpreter_call.outputs".split()
) | {ENCRYPTED, _LOGPROBS}
_REFERENCE = "item_reference"
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_OF_CLIENTS = ("_output", "_response")
"""How the types of those items end that clients make, besides messages."""
_SUMMARIES = ("auto", "concise", "detailed")
_VERBOSITIES = ("low", "medium", "high")
_FORMATS = ("text", "json_object", "json_schema")
_TRUNCATIONS = ("auto", "disabled")
_METADATA_LIMIT, _METADATA_NAME_CHARS, _METADATA_CHARS = 16, 64, 512
_ID_CHARS = 128
_BETWEEN_TEXTS = "\n\n"
_CHAT_NAMES = {
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tools.function.strict": "tools.strict",
    TOOL_GRAMMARS: "tools.format",
    "messages": "input",
}
_IN_MESSAGE = re.compile(r"messages\[(?P<message>\d+)\](\.content\[(?P<part>\d+)\])?(?P<rest>.*)")
_IN_TOOL = re.compile(r"tools\[(?P<tool>\d+)\](\.function)?(?P<rest>.*)")


class ResponsesRequest(NamedTuple):
    """What a body asks."""

    body: Mapping[str, Any]
    items: tuple[Item, ...]
    """Its input."""
    tools: ToolSet
    previous_id: str
    conversation_id: str
    store: bool
    background: bool
    encrypted: bool
    """Reasoning comes with its sealed form, for clients that keep the conversation themselves."""
    summarised: bool
    """Reasoning comes as its summary, as the request asks for one."""

    def after(self, history: Sequence[Item]) -> ResponsesRequest:
        """Return the request with the tools that its client found earlier; raise `FieldError`."""
        if not history:
            return self
        earlier = "previous_response_id" if self.previous_id else "conversation"
        items = [*((earlier, item) for item in history), *_placed(self.items)]
        return self._replace(tools=read_tools(self.body, items))

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the fields and tools that change no answer."""
        named = tuple(name for name, value in self.body.items() if _is_ignored(name, value))
        verbose = ("text.verbosity",) if (self.body.get("text") or {}).get("verbosity") else ()
        return named + verbose + self.tools.left_out


class Chat(NamedTuple):
    """A request for `/v1/chat/completions`."""

    body: Json
    places: Sequence[Sequence[str]]
    """Of each message, the place in the Responses request, then those of its parts."""
    tool_places: tuple[str, ...] = ()
    """The place of each tool."""
    grammars: Mapping[str, TextGrammar] = {}
    """Those of the tools, by the names of the functions."""
    replaced: tuple[str, ...] = ()
    """The place and the type of each item and part that words replace."""

    def param(self, name: str) -> str:
        """Return the field of the Responses request behind a field of the chat."""
        if (found := _IN_MESSAGE.fullmatch(name)) and int(found["message"]) < len(self.places):
            place, *parts = self.places[int(found["message"])]
            if found["part"] and int(found["part"]) < len(parts):
                place = parts[int(found["part"])]
            return place + found["rest"]
        if (found := _IN_TOOL.fullmatch(name)) and int(found["tool"]) < len(self.tool_places):
            return self.tool_places[int(found["tool"])] + found["rest"]
        for function, grammar in self.grammars.items():
            field = f"{TOOL_GRAMMARS}.{function}"
            if name == field or name.startswith(f"{field}."):
                return grammar.place + name[len(field) :]
        for chat_name, own_name in _CHAT_NAMES.items():
            if name == chat_name or name.startswith((f"{chat_name}.", f"{chat_name}[")):
                return own_name
        return name


def read_request(body: Mapping[str, Any]) -> ResponsesRequest:
    """Read a parsed body; raise `FieldError`."""
    for name, value in body.items():
        if name not in FIELDS:
            raise FieldError(name[:100], f"Unknown parameter: '{name[:100]}'.")
        if name in _REFUSED_FIELDS and value is not None:
            raise FieldError(name, f"This gateway does not support '{name}'.")
    fields = Fields(body)
    for name in ("instructions", "user", "safety_identifier", "prompt_cache_key", "service_tier"):
        if not isinstance(body.get(name), str | None):
            raise FieldError(name, f"'{name}' must be a string.")
    fields.integer("max_output_tokens", None, low=1)
    fields.integer("max_tool_calls", None, low=1)
    fields.integer("top_logprobs", None, low=0, high=20)
    fields.choice("parallel_tool_calls")
    _one_of(body.get("truncation"), "truncation", _TRUNCATIONS)
    check_metadata(body.get("metadata"))
    reasoning, text = fields.object("reasoning"), fields.object("text")
    _one_of(reasoning.get("effort"), "reasoning.effort", REASONING_EFFORTS)
    _one_of(reasoning.get("summary"), "reasoning.summary", _SUMMARIES)
    _one_of(text.get("verbosity"), "text.verbosity", _VERBOSITIES)
    previous_id, conversation_id = _previous_of(body)
    include = _include_of(body)
    items = tuple(read_items(body.get("input"), "input"))
    store = fields.choice("store") is not False
    background = fields.flag("background")
    if background and not store:
        raise FieldError("background", "'background' needs 'store': true.")
    return ResponsesRequest(
        body=body,
        items=items,
        tools=read_tools(body, _placed(items)),
        previous_id=previous_id,
        conversation_id=conversation_id,
        store=store,
        background=background,
        encrypted=ENCRYPTED in include,
        summarised=reasoning.get("summary") is not None,
    )


def read_items(given: Any, where: str) -> Iterator[Item]:
    """Yield the items of an input, each with its type; raise `FieldError`."""
    if isinstance(given, str):
        yield {"type": "message", "role": "user", "content": given}
        return
    if not isinstance(given, list) or len(given) > ITEMS_LIMIT:
        raise FieldError(
            where, f"'{where}' must be a string or a list of at most {ITEMS_LIMIT} items."
        )
    for index, item in enumerate(given):
        if isinstance(item, Mapping) and item.get("type") is None and "role" in item:
            yield {"type": "message", **{k: v for k, v in item.items() if k != "type"}}
        else:
            kind_of(item, f"{where}[{index}]")
            yield item


def to_chat(
    request: ResponsesRequest,
    unseal: Callable[[str], str | None],
    history: Sequence[Item] = (),
    reading: Readable = Readable(),  # noqa: B008
) -> Chat:
    """Translate a request after its history into a chat; raise `FieldError`.

    `unseal` returns reasoning that this gateway has sealed, and None for anything else.
    """
    body = request.body
    messages = _Messages(unseal, reading)
    if body.get("instructions"):
        messages.add({"role": "system", "content": body["instructions"]}, ["instructions"])
    # What is kept was new once, and not refused then.
    earlier = "previous_response_id" if request.previous_id else "conversation"
    messages.read([(earlier, item) for item in history], turn=len(history))
    messages.read_new(request.items, "input")
    if request.items and request.items[-1]["type"] == _REFERENCE:
        at = f"input[{len(request.items) - 1}]"
        raise FieldError(f"{at}.id", "No stored item has this id.")
    if not messages.messages:
        raise FieldError("input", "'input' must contain at least one message.")
    chat: Json = {name: body[name] for name in _SAME_FIELDS if body.get(name) is not None}
    chat["messages"] = messages.messages
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("truncation") == "auto":
        chat["truncate_prompt_tokens"] = -1
    chat |= _tools_of(request) | _text_of(Fields(body).object("text")) | _logprobs_of(body)
    if effort := Fields(body).object("reasoning").get("effort"):
        chat["reasoning_effort"] = effort
    names = [one["function"]["name"] for one in request.tools.functions]
    tool_places = tuple(request.tools.origins[name].place for name in names)
    grammars = request.tools.grammars
    return Chat(chat, messages.places, tool_places, grammars, tuple(messages.replaced))


def check_items(items: Sequence[Item], where: str) -> None:
    """Check that items can stand in a chat; raise `FieldError`."""
    # A PDF is read when a model is to read it.
    documents = dict.fromkeys(pdfs_in(items), Document("?"))
    reading = Readable(documents=documents)
    _Messages(lambda _sealed: None, reading).read_new(items, where)


@dataclass(slots=True)
class _Reply:
    """A message of the assistant, which several items make up."""

    place: str
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    spoken: bool = False
    """Whether it has the text of an item, and not only words in place of others."""

    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": "".join(self.texts) or None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _Messages:
    """Collects the messages of a chat from items; words replace what no model can read.

    Only what the user says in this turn is refused if the model cannot read it: a client sends
    everything else again with each turn, and so could never go on.
    """

    def __init__(self, unseal: Callable[[str], str | None], reading: Readable) -> None:
        self.messages: list[Json] = []
        self._leading = True
        """Whether all messages so far are system messages."""
        self.places: list[list[str]] = []
        self.replaced: list[str] = []
        self._unseal = unseal
        self._reading = reading
        self._reply: _Reply | None = None
        self._behind: list[tuple[str, Json]] = []
        """What a message of the user has behind the results of tools, each with its place."""

    def add(self, message: Json, places: list[str]) -> None:
        """Add a message with its place and those of its parts."""
        self.messages.append(message)
        self.places.append(places)
        self._leading &= message["role"] == "system"

    def read_new(self, items: Sequence[Item], where: str) -> None:
        """Add the messages of the items of a request."""
        behind = [index + 1 for index, item in enumerate(items) if not _is_clients(item)]
        placed = [(f"{where}[{index}]", item) for index, item in enumerate(items)]
        self.read(placed, turn=max(behind, default=0))

    def read(self, items: Sequence[tuple[str, Item]], *, turn: int) -> None:
        """Add the messages of items, each with its place; those from `turn` on are new."""
        for index, (place, item) in enumerate(items):
            self._read(item, place, new=index >= turn)
        self._end_reply()
        self._end_results()

    def _read(self, item: Item, at: str, *, new: bool) -> None:
        kind = item["type"]
        if not kind.endswith(_OF_CLIENTS):
            self._end_results()
        match kind:
            case "message":
                self._read_message(item, at, new=new)
            case "reasoning":
                self._read_reasoning(item, at)
            case "function_call":
                self._read_call(item, _text(item, "arguments", at), at)
            case "custom_tool_call":
                self._read_call(item, custom_arguments(_text(item, "input", at)), at)
            case "tool_search_call" if isinstance(item.get("call_id"), str):
                arguments = item.get("arguments")
                text = arguments if isinstance(arguments, str) else encode_text(arguments)
                self._read_call({**item, "name": "tool_search"}, text, at)
            case "tool_search_output" if isinstance(item.get("call_id"), str):
                self._end_reply()
                text = _BETWEEN_TEXTS.join(f"Tool: {name}" for name in found_names(item, at))
                self.add({"role": "tool", "tool_call_id": item["call_id"], "content": text}, [at])
            case _ if kind in _OUTPUTS:
                self._end_reply()
                self._read_output(item, at)
            case _ if _is_clients(item):
                self._behind.append((at, self._words(kind, at)))
            case _:
                # What came of tools that ran on OpenAI's servers stands in the messages too.
                self._open_reply(at, fresh=False).texts.append(self._words(kind, at)["text"])

    def _read_message(self, item: Item, at: str, *, new: bool) -> None:
        role = item.get("role")
        placed = self._parts_of(item.get("content"), f"{at}.content", new=new)
        if role == "assistant":
            reply = self._open_reply(at, fresh=bool(self._reply and self._reply.spoken))
            texts = [
                part["text"]
                if part["type"] == "text"
                else self._words("input_image", place)["text"]
                for place, part in placed
            ]
            reply.texts += filter(None, texts)
            reply.spoken = bool(reply.texts)
            return
        if role not in ("user", "system", "developer"):
            raise FieldError(
                f"{at}.role", f"'{at}.role' must be user, assistant, system or developer."
            )
        self._end_reply()
        # A system message in the middle stays at its place: moved to the front, it would change
        # the beginning of the prompt, which is read already.
        text_alone = all(part["type"] == "text" for _, part in placed)
        system = role != "user" and (self._leading or (self._reading.system_inside and text_alone))
        self._add_parts("system" if system else "user", placed, at)

    def _read_reasoning(self, item: Item, at: str) -> None:
        sealed = item.get("encrypted_content")
        if sealed is not None:
            # Another model's reasoning is none of this one's.
            text = self._unseal(_text(item, "encrypted_content", at)) or ""
        else:
            placed = self._parts_of(item.get("content") or [], f"{at}.content", new=False)
            text = "".join(part.get("text", "") for _, part in placed)
        if text:
            reply = self._open_reply(
                at, fresh=bool(self._reply and (self._reply.spoken or self._reply.calls))
            )
            reply.reasoning.append(text)

    def _read_call(self, item: Item, arguments: str, at: str) -> None:
        namespace = item.get("namespace")
        if not isinstance(namespace, str | None):
            raise FieldError(f"{at}.namespace", f"'{at}.namespace' must be a string.")
        function = {"name": flat_name(_text(item, "name", at), namespace), "arguments": arguments}
        call = {"id": _text(item, "call_id", at), "type": "function", "function": function}
        self._open_reply(at, fresh=False).calls.append(call)

    def _read_output(self, item: Item, at: str) -> None:
        output = item.get("output") or ""
        if not isinstance(output, str | list):
            output = encode_text(output)
        placed = self._parts_of(output, f"{at}.output", new=False)
        text = _BETWEEN_TEXTS.join(part["text"] for _, part in placed if part["type"] == "text")
        # Templates take pictures from users alone.
        self._behind += [one for one in placed if one[1]["type"] != "text"]
        call_id = _text(item, "call_id", at)
        self.add({"role": "tool", "tool_call_id": call_id, "content": text}, [at])

    def _parts_of(self, content: Any, where: str, *, new: bool) -> list[tuple[str, Json]]:
        """Return the parts of a content, each with its place."""
        if isinstance(content, str):
            return [(where, {"type": "text", "text": content})]
        if not isinstance(content, list):
            raise FieldError(where, f"'{where}' must be a string or a list of parts.")
        placed = []
        for index, part in enumerate(content):
            at = f"{where}[{index}]"
            placed += [(at, one) for one in self._readable(part, at, new=new)]
        return placed

    def _readable(self, part: Any, at: str, *, new: bool) -> list[Json]:
        """Return the parts of a chat for a part, or words in its place."""
        try:
            kind = kind_of(part, at)
            if (pdf := pdf_of(part)) is not None:
                return self._reading.document(pdf, part.get("filename"))
            read = _part_of(part, kind, at)
        except DocumentUnreadable as problem:
            if new:
                raise unreadable_pdf(f"{at}.file_data", problem) from None
            return [self._words(kind, at, words_for_pdf(str(problem)))]
        except FieldError:
            if new:
                raise
            kind, read = "unknown", None
        if new and read is None:
            raise _unsupported(kind, at)
        if read is not None and (new or read["type"] == "text" or self._reading.takes(read)):
            return [read]
        return [self._words(kind, at)]

    def _words(self, kind: str, at: str, words: str = "") -> Json:
        """Return the part with words in place of what no model can read."""
        self.replaced.append(named(at, kind))
        return {"type": "text", "text": words or words_for(kind)}

    def _open_reply(self, at: str, *, fresh: bool) -> _Reply:
        if fresh:
            self._end_reply()
        if self._reply is None:
            self._reply = _Reply(at)
        return self._reply

    def _end_reply(self) -> None:
        reply, self._reply = self._reply, None
        if reply is not None and (reply.texts or reply.calls or reply.reasoning):
            self.add(reply.message(), [reply.place])

    def _end_results(self) -> None:
        placed, self._behind = self._behind, []
        if placed:
            self._end_reply()
            self._add_parts("user", placed, placed[0][0])

    def _add_parts(self, role: str, placed: Sequence[tuple[str, Json]], at: str) -> None:
        parts = [part for _, part in placed]
        if all(part["type"] == "text" for part in parts):
            text = _BETWEEN_TEXTS.join(part["text"] for part in parts)
            self.add({"role": role, "content": text}, [at])
        else:
            self.add({"role": role, "content": parts}, [at, *(place for place, _ in placed)])


def _placed(items: Sequence[Item]) -> Iterator[tuple[str, Item]]:
    return ((f"input[{index}]", item) for index, item in enumerate(items))


def _is_clients(item: Item) -> bool:
    """Return whether clients make an item, and not the assistant."""
    kind = item["type"]
    return item.get("role") != "assistant" if kind == "message" else kind.endswith(_OF_CLIENTS)


def _part_of(part: Mapping[str, Any], kind: str, at: str) -> Json | None:
    """Return the part of a chat for a part of an item; None if chats have none."""
    match kind:
        case "input_text" | "output_text" | "text" | "reasoning_text":
            return {"type": "text", "text": _text(part, "text", at)}
        case "refusal":
            return {"type": "text", "text": _text(part, "refusal", at)}
        case "input_image" if isinstance(part.get("image_url"), str):
            return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return None


def _text(item: Mapping[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise FieldError(f"{at}.{name}", f"'{at}.{name}' must be a string.")
    return value


def _unsupported(kind: str, at: str) -> FieldError:
    if kind == "input_image":
        return FieldError(f"{at}.image_url", f"'{at}.image_url' must be a 'data:' URL.")
    return FieldError(f"{at}.type", f"This gateway does not support '{kind[:100]}' ('{at}.type').")


def _tools_of(request: ResponsesRequest) -> Json:
    tools = request.tools
    if not tools.functions:
        return {}
    chosen: Json = {"tools": list(tools.functions)}
    if tools.choice is not None:
        chosen["tool_choice"] = tools.choice
    names = [one["function"]["name"] for one in tools.functions]
    if grammars := {name: tools.grammars[name] for name in names if name in tools.grammars}:
        chosen[TOOL_GRAMMARS] = {
            name: {"syntax": grammar.syntax, "definition": grammar.definition}
            for name, grammar in grammars.items()
        }
    if request.body.get("parallel_tool_calls") is not None:
        chosen["parallel_tool_calls"] = request.body["parallel_tool_calls"]
    return chosen


def _text_of(text: Mapping[str, Any]) -> Json:
    form = text.get("format")
    if form is None:
        return {}
    kind = _one_of(kind_of(form, "text.format"), "text.format.type", _FORMATS)
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(form.get("schema"), Mapping):
        raise FieldError("text.format.schema", "'text.format.schema' must be a JSON Schema.")
    schema = {"name": form.get("name") or "answer", "schema": form["schema"]}
    schema |= {name: form[name] for name in ("strict", "description") if form.get(name) is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _logprobs_of(body: Mapping[str, Any]) -> Json:
    top = body.get("top_logprobs")
    if top is None and _LOGPROBS not in (body.get("include") or ()):
        return {}
    return {"logprobs": True, "top_logprobs": top or 0}


def _include_of(body: Mapping[str, Any]) -> Sequence[str]:
    include = body.get("include")
    if include is None:
        return ()
    if not isinstance(include, list):
        raise FieldError("include", "'include' must be a list.")
    for index, name in enumerate(include):
        if not isinstance(name, str) or name not in _INCLUDABLE:
            raise FieldError(
                f"include[{index}]", f"'include[{index}]' must be one of {sorted(_INCLUDABLE)}."
            )
    return include


def _previous_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the ids of the response and of the conversation that the request goes on from."""
    previous, conversation = body.get("previous_response_id"), body.get("conversation")
    place = "conversation"
    if isinstance(conversation, Mapping):
        conversation, place = conversation.get("id", 0), "conversation.id"
    for value, name in ((previous, "previous_response_id"), (conversation, place)):
        if value is not None and not (isinstance(value, str) and len(value) <= _ID_CHARS):
            raise FieldError(name, f"'{name}' must be a string of at most {_ID_CHARS} characters.")
    if previous and conversation:
        raise FieldError(
            "previous_response_id", "'previous_response_id' and 'conversation' exclude each other."
        )
    return previous or "", conversation or ""


def check_metadata(metadata: Any) -> dict[str, str]:
    """Return the metadata of a body; raise `FieldError`."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or len(metadata) > _METADATA_LIMIT:
        raise FieldError(
            "metadata", f"'metadata' must be an object of at most {_METADATA_LIMIT} strings."
        )
    for name, value in metadata.items():
        fits = len(name) <= _METADATA_NAME_CHARS and isinstance(value, str)
        if not fits or len(value) > _METADATA_CHARS:
            raise FieldError(
                f"metadata.{name[:_METADATA_NAME_CHARS]}",
                f"'metadata' holds strings of at most {_METADATA_CHARS} characters, under names of "
                f"at most {_METADATA_NAME_CHARS}.",
            )
    return dict(metadata)


def _one_of(value: Any, name: str, values: Sequence[str]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in values:
        raise FieldError(name, f"'{name}' must be one of {tuple(values)}.")
    return value


def _is_ignored(name: str, value: Any) -> bool:
    return name in _IGNORED_FIELDS and value is not None
