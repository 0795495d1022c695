"""A Responses request: read from its body, and translated into a chat.

https://platform.openai.com/docs/api-reference/responses. Fields that concern only OpenAI's own
service, such as `service_tier`, are accepted and omitted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.protocols.base import call_of
from gateway.protocols.documents import Document, Readable, pdf_of, pdfs_in
from gateway.protocols.history import BETWEEN_TEXTS, Replacements, message_of, reply_of, texts_of
from gateway.protocols.responses.items import ITEMS, OUTPUTS
from gateway.protocols.responses.tools import (
    ToolSet,
    custom_arguments,
    flat_name,
    found_names,
    kind_of,
    must,
    read_tools,
)
from gateway.protocols.translation import Chat, form_of, same_fields, with_own
from gateway.strict_json import ITEMS_LIMIT, encode_text
from gateway.types import Json
from paceline.request.call_rules import MAX_TOOL_CALLS
from paceline.request.constraint import TOOL_GRAMMARS
from paceline.request.content import FILE_PROBLEM, file_fault, marks_of
from paceline.request.fields import FieldError, Fields
from paceline.request.keys import Inside, check_keys
from paceline.request.wires import Wire, read_ignored

Item = Mapping[str, Any]
ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(
    "file_search_call.results web_search_call.results web_search_call.action.sources "
    "message.input_image.image_url computer_call_output.output.image_url "
    "code_interpreter_call.outputs".split()
) | {ENCRYPTED, _LOGPROBS}
_REFERENCE = "item_reference"
_OF_CLIENTS = ("_output", "_response")
"""How the types of those items end that clients make, besides messages."""
UNNAMED = "answer"
"""The name of a schema without one."""
_VALUES = {
    "truncation": ("auto", "disabled"),
    "reasoning.summary": ("auto", "concise", "detailed"),
    "reasoning.generate_summary": ("auto", "concise", "detailed"),
    "text.verbosity": ("low", "medium", "high"),
}
_METADATA_LIMIT, _METADATA_NAME_CHARS, _METADATA_CHARS = 16, 64, 512
_ID_CHARS = 128
_CALL_LIMITS = ("parallel_tool_calls", MAX_TOOL_CALLS)
_CHAT_NAMES = {
    "max_tokens": "max_output_tokens",
    "truncate_prompt_tokens": "truncation",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    TOOL_GRAMMARS: "tools.format",
    "tools.function.strict": "tools.strict",
    "messages": "input",
}


class ResponsesRequest(NamedTuple):
    """The content of a body."""

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
    ignored: tuple[str, ...]
    """Fields, and names inside of them, that change no answer."""

    def after(self, history: Sequence[Item]) -> "ResponsesRequest":
        """Return the request with the tools that its client found earlier; raise `FieldError`."""
        if not history:
            return self
        earlier = "previous_response_id" if self.previous_id else "conversation"
        items = [*((earlier, item) for item in history), *_placed(self.items)]
        return self._replace(tools=read_tools(self.body, items, Inside()))


def read_request(body: Mapping[str, Any]) -> ResponsesRequest:
    """Read a parsed body; raise `FieldError`."""
    ignored = read_ignored(body, Wire.RESPONSES)
    fields, inside = Fields(body), Inside()
    for name in ("reasoning", "text", "stream_options"):
        check_keys(f"RESPONSES {name}", fields.object(name), inside)
    for name in ("instructions", "user", "safety_identifier", "prompt_cache_key", "service_tier"):
        if not isinstance(body.get(name), str | None):
            raise must(name, "be a string")
    fields.integer("max_tool_calls", None, low=1)
    fields.choice("parallel_tool_calls")
    check_metadata(body.get("metadata"))
    for place, values in _VALUES.items():
        outer, _, name = place.rpartition(".")
        value = (fields.object(outer) if outer else body).get(name)
        if value is not None and value not in values:
            raise must(place, f"be one of {values}")
    previous_id, conversation_id = _previous_of(body)
    include = _include_of(body)
    given = body.get("input")
    if given is None and (previous_id or conversation_id):
        given = []  # the model goes on from what is kept
    items = tuple(read_items(given, "input"))
    tools = read_tools(body, _placed(items), inside)
    store = fields.choice("store") is not False
    background = fields.flag("background")
    if background and not store:
        raise FieldError("background", "'background' needs 'store': true.")
    return ResponsesRequest(
        body=body,
        items=items,
        tools=tools,
        previous_id=previous_id,
        conversation_id=conversation_id,
        store=store,
        background=background,
        encrypted=ENCRYPTED in include,
        summarised=any(
            fields.object("reasoning").get(name) is not None
            for name in ("summary", "generate_summary")
        ),
        ignored=(*ignored, *inside),
    )


def read_items(given: Any, where: str) -> Iterator[Item]:
    """Yield the items of an input, each with its type; raise `FieldError`."""
    if isinstance(given, str):
        yield {"type": "message", "role": "user", "content": given}
        return
    if not isinstance(given, list) or len(given) > ITEMS_LIMIT:
        raise must(where, f"be a string or a list of at most {ITEMS_LIMIT} items")
    for index, item in enumerate(given):
        untyped = isinstance(item, Mapping) and item.get("type") is None
        if untyped and "role" in item:
            yield {**item, "type": "message"}
        elif untyped and item.keys() - {"type"} == {"id"}:
            yield {**item, "type": _REFERENCE}
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
        raise must("input", "contain at least one message")
    chat = same_fields(body)
    same = frozenset(chat)
    chat["messages"] = messages.messages
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    own: Json = {"truncate_prompt_tokens": -1} if body.get("truncation") == "auto" else {}
    top_logprobs = body.get("top_logprobs")
    if top_logprobs is not None or _LOGPROBS in (body.get("include") or ()):
        chat |= {"logprobs": True, "top_logprobs": top_logprobs}
    form = Fields(body).object("text").get("format")
    own |= form_of(form, "RESPONSES text.format", name=UNNAMED)
    if (effort := Fields(body).object("reasoning").get("effort")) is not None:
        own["reasoning_effort"] = effort
    with_own(chat, own, _CHAT_NAMES)
    chat |= _tools_of(request)
    tools = request.tools
    grammars = {
        f"{TOOL_GRAMMARS}.{name}": f"{tool.place}.format" for name, tool in tools.by_name.items()
    }
    return Chat(
        chat,
        grammars | _CHAT_NAMES,
        messages.places,
        [tool.place for tool in tools.by_name.values()],
        tools.left_out,
        tuple(messages.replaced),
        same,
        (*request.ignored, *messages.inside),
    )


def check_items(items: Sequence[Item], where: str) -> None:
    """Check that items can stand in a chat; raise `FieldError`."""
    # A PDF is read when a model is to read it.
    documents = dict.fromkeys(pdfs_in(items), Document("?"))
    reading = Readable(documents=documents)
    _Messages(lambda _sealed: None, reading).read_new(items, where)


@dataclass(slots=True)
class _Reply:
    """A message of the assistant, which several items make up."""

    place: str = ""
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    spoken: bool = False
    """Whether it has the text of an item, and not only words in place of others."""
    marks: Json = field(default_factory=dict)
    """The marks that make the answer continue it."""


class _Messages(Replacements):
    """Collects the messages of a chat from items; words replace unreadable parts."""

    def __init__(self, unseal: Callable[[str], str | None], reading: Readable) -> None:
        super().__init__(reading)
        self.messages: list[Json] = []
        self._leading = True
        """Whether all messages so far are system messages."""
        self.places: list[list[str]] = []
        self._unseal = unseal
        self.inside = Inside()
        """The ignored names inside items."""
        self._reply = _Reply()
        self._behind: list[tuple[str, Json]] = []
        """The user's parts after the results of tools, each with its place."""

    def add(self, message: Json, places: list[str]) -> None:
        """Add a message with its place and those of its parts."""
        self.messages.append(message)
        self.places.append(places)
        self._leading &= message["role"] == "system"

    def read_new(self, items: Sequence[Item], where: str) -> None:
        """Add the messages of the items of a request."""
        behind = [index + 1 for index, item in enumerate(items) if not _is_clients(item)]
        self.read(_placed(items, where), turn=max(behind, default=0))

    def read(self, items: Sequence[tuple[str, Item]], *, turn: int) -> None:
        """Add the messages of items, each with its place; those from `turn` on are new."""
        for index, (place, item) in enumerate(items):
            self.inside.echoed = not _is_clients(item)
            self._read(item, place, new=index >= turn)
        self.inside.echoed = False
        self._end_reply()
        self._end_results()

    def _read(self, item: Item, at: str, *, new: bool) -> None:
        kind = item["type"]
        if kind in ITEMS:
            row = "RESPONSES input.message" if kind == "message" else "RESPONSES input"
            check_keys(row, item, self.inside, at)
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
                text = BETWEEN_TEXTS.join(f"Tool: {name}" for name in found_names(item, at))
                self.add({"role": "tool", "tool_call_id": item["call_id"], "content": text}, [at])
            case _ if kind in OUTPUTS:
                self._end_reply()
                self._read_output(item, at)
            case _ if _is_clients(item):
                self._behind.append((at, self.words(kind, at)))
            case _:
                # What came of tools that ran on OpenAI's servers stands in the messages too.
                self._open_reply(at, fresh=False).texts.append(self.words(kind, at)["text"])

    def _read_message(self, item: Item, at: str, *, new: bool) -> None:
        role = item.get("role")
        placed = self._parts_of(item.get("content"), f"{at}.content", new=new)
        if role == "assistant":
            reply = self._open_reply(at, fresh=self._reply.spoken)
            for place, part in placed:
                text = part.get("text", "")
                if part["type"] != "text":
                    text = self.words("input_image", place)["text"]
                reply.texts += [text] if text else ()
            reply.spoken = bool(reply.texts)
            reply.marks = marks_of(item)
            reply.place = at if reply.marks else reply.place
            return
        if role not in ("user", "system", "developer"):
            raise must(f"{at}.role", "be user, assistant, system or developer")
        self._end_reply()
        # A system message in the middle stays at its place: moved to the front, it would change
        # the beginning of the prompt, which is read already.
        message, places = message_of("user", placed, at)
        inside = self.reading.system_inside and len(places) == 1
        if role != "user" and (self._leading or inside):
            message["role"] = "system"
        self.add(message | marks_of(item), places)

    def _read_reasoning(self, item: Item, at: str) -> None:
        sealed = item.get("encrypted_content")
        if sealed is not None:
            # Another model's reasoning is none of this one's.
            text = self._unseal(_text(item, "encrypted_content", at)) or ""
        else:
            placed = self._parts_of(item.get("content") or [], f"{at}.content", new=False)
            text = "".join(part.get("text", "") for _, part in placed)
        if text:
            fresh = self._reply.spoken or bool(self._reply.calls)
            self._open_reply(at, fresh=fresh).reasoning.append(text)

    def _read_call(self, item: Item, arguments: str, at: str) -> None:
        namespace = item.get("namespace")
        if not isinstance(namespace, str | None):
            raise must(f"{at}.namespace", "be a string")
        name = flat_name(_text(item, "name", at), namespace)
        call = call_of(_text(item, "call_id", at), name, arguments)
        self._open_reply(at, fresh=False).calls.append(call)

    def _read_output(self, item: Item, at: str) -> None:
        output = item.get("output") or ""
        if not isinstance(output, str | list):
            output = encode_text(output)
        placed = self._parts_of(output, f"{at}.output", new=False)
        # Templates take pictures from users alone.
        self._behind += [one for one in placed if one[1]["type"] != "text"]
        call_id, text = _text(item, "call_id", at), texts_of(placed)
        self.add({"role": "tool", "tool_call_id": call_id, "content": text}, [at])

    def _parts_of(self, content: Any, where: str, *, new: bool) -> list[tuple[str, Json]]:
        """Return the parts of a content, each with its place."""
        if isinstance(content, str):
            return [(where, {"type": "text", "text": content})]
        if not isinstance(content, list):
            raise must(where, "be a string or a list of parts")
        placed = []
        for index, part in enumerate(content):
            at = f"{where}[{index}]"
            placed += [(at, one) for one in self._readable(part, at, new=new)]
        return placed

    def _readable(self, part: Any, at: str, *, new: bool) -> list[Json]:
        """Return the parts of a chat for a part, or words in its place."""
        check_keys("RESPONSES input.content", part, self.inside, at)
        try:
            kind = kind_of(part, at)
            read = _part_of(part, kind, at)
        except FieldError:
            if new:
                raise
            return [self.words("unknown", at)]
        if (pdf := pdf_of(part)) is not None:
            name, place = part.get("filename"), f"{at}.file_data"
            return self.document(pdf, name, kind, at, place, new=new)
        if new and kind == "input_file":
            field, problem = file_fault(part), FILE_PROBLEM
            if not field:
                field, problem = "file_data", "This gateway reads only PDF files."
            raise FieldError(f"{at}.{field}", problem)
        if new and read is None and kind == "input_image":
            raise must(f"{at}.image_url", "be a 'data:' URL")
        if new and read is None:
            problem = f"This gateway does not support '{kind[:100]}' ('{at}.type')."
            raise FieldError(f"{at}.type", problem)
        return [self.part(read, kind, at, new=new)]

    def _open_reply(self, at: str, *, fresh: bool) -> _Reply:
        if fresh:
            self._end_reply()
        self._reply.place = self._reply.place or at
        return self._reply

    def _end_reply(self) -> None:
        reply, self._reply = self._reply, _Reply()
        message = reply_of(reply.texts, reply.reasoning, reply.calls)
        if message or reply.marks:
            self.add({"role": "assistant", "content": None} | message | reply.marks, [reply.place])

    def _end_results(self) -> None:
        placed, self._behind = self._behind, []
        if placed:
            self._end_reply()
            self.add(*message_of("user", placed, placed[0][0]))


def _placed(items: Sequence[Item], where: str = "input") -> list[tuple[str, Item]]:
    return [(f"{where}[{index}]", item) for index, item in enumerate(items)]


def _is_clients(item: Item) -> bool:
    """Return whether clients make an item, and not the assistant."""
    kind = item["type"]
    return item.get("role") != "assistant" if kind == "message" else kind.endswith(_OF_CLIENTS)


def _part_of(part: Mapping[str, Any], kind: str, at: str) -> Json | None:
    """Return the part of a chat for a part of an item; None if chats lack it."""
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
        raise must(f"{at}.{name}", "be a string")
    return value


def _tools_of(request: ResponsesRequest) -> Json:
    tools = request.tools.by_name
    if not tools:
        return {}
    grammars = {name: tool.grammar for name, tool in tools.items() if tool.grammar}
    return {
        "tools": [tool.function for tool in tools.values()],
        "tool_choice": request.tools.choice,
        TOOL_GRAMMARS: grammars or None,
        **{name: request.body.get(name) for name in _CALL_LIMITS},
    }


def _include_of(body: Mapping[str, Any]) -> Sequence[str]:
    include = body.get("include")
    if not isinstance(include, list | None):
        raise must("include", "be a list")
    for index, name in enumerate(include or ()):
        if not isinstance(name, str) or name not in _INCLUDABLE:
            raise must(f"include[{index}]", f"be one of {sorted(_INCLUDABLE)}")
    return include or ()


def _previous_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the ids of the response and of the conversation that the request goes on from."""
    previous, conversation = body.get("previous_response_id"), body.get("conversation")
    place = "conversation"
    if isinstance(conversation, Mapping):
        check_keys("RESPONSES conversation", conversation)
        conversation, place = conversation.get("id", 0), "conversation.id"
    for value, name in ((previous, "previous_response_id"), (conversation, place)):
        if value is not None and not (isinstance(value, str) and len(value) <= _ID_CHARS):
            raise must(name, f"be a string of at most {_ID_CHARS} characters")
    if previous and conversation:
        problem = "Use either 'previous_response_id' or 'conversation', not both."
        raise FieldError("previous_response_id", problem)
    return previous or "", conversation or ""


def check_metadata(metadata: Any) -> dict[str, str]:
    """Return the metadata of a body; raise `FieldError`."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or len(metadata) > _METADATA_LIMIT:
        raise must("metadata", f"be an object of at most {_METADATA_LIMIT} strings")
    for name, value in metadata.items():
        fits = len(name) <= _METADATA_NAME_CHARS and isinstance(value, str)
        if not fits or len(value) > _METADATA_CHARS:
            raise FieldError(
                f"metadata.{name[:_METADATA_NAME_CHARS]}",
                f"'metadata' may contain strings of at most {_METADATA_CHARS} characters, with "
                f"names of at most {_METADATA_NAME_CHARS}.",
            )
    return dict(metadata)
