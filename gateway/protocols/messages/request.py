"""A request for a message as a request for a chat."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from gateway.protocols.base import call_of
from gateway.protocols.documents import Readable, pdf_of
from gateway.protocols.history import Replacements, last_turn, message_of, named, reply_of, texts_of
from gateway.protocols.messages.context_management import FIELD as CONTEXT_MANAGEMENT
from gateway.protocols.messages.context_management import edit_messages
from gateway.protocols.translation import Chat, form_of, same_fields, with_own
from gateway.strict_json import ITEMS_LIMIT, encode_text, objects_of
from gateway.types import Json
from paceline.request.constraint import TOOL_GRAMMARS
from paceline.request.content import CONTINUES, marks_of
from paceline.request.fields import FieldError, Fields
from paceline.request.keys import Inside, check_keys
from paceline.request.wires import Wire, read_ignored

# Claude Code writes a digest of each request there, so that no two prompts would begin alike.
_BILLING_MARK = "x-anthropic-billing-header"
_SERVICE_BLOCKS = ("redacted_thinking", "server_tool_use", "mcp_tool_use")
"""Blocks that Anthropic's own service writes for itself, and the results of its tools."""
_CHAT_NAMES = {
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
    "include_reasoning": "thinking.display",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tools.function.strict": "tools.strict",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "add_generation_prompt": "messages",
    "continue_final_message": "messages",
}
_EFFORT = "reasoning_effort"
_READ = frozenset(
    "text image document search_result thinking redacted_thinking tool_use tool_result "
    "tool_reference tool_addition tool_removal".split()
)
"""The types of blocks that are read; words stand for the others."""
_BETWEEN_TEXTS = "\n\n"


@dataclass(slots=True)
class MessagesChat(Chat):
    """A request for a message as a chat."""

    edits: Json = field(default_factory=dict)
    """The edits of `context_management`, as the response lists them, if the request has it."""
    breakpoint_in: str = ""
    """Where the last breakpoint of Anthropic's cache is: in `messages`, in `system`, or nowhere."""

    def inside(self, place: str, rest: str, *, in_messages: bool) -> str:
        """Return the client's name of a part of a message or a tool; `rest` is the chat's."""
        if not in_messages:
            return place + rest.replace(".parameters", ".input_schema", 1)
        return place.removesuffix(".content") + rest if rest[1:] in CONTINUES else place

    @property
    def shows_reasoning(self) -> bool:
        """Whether the client wants reasoning, which some engines send all the same."""
        hidden = self.body.get("include_reasoning") is False
        return not hidden and self.body.get("reasoning_effort") != "none"


def to_chat(
    body: Mapping[str, Any],
    is_ours: Callable[[str, str], bool],
    reading: Readable = Readable(),  # noqa: B008
) -> MessagesChat:
    """Translate a request into a chat; raise `FieldError`.

    `is_ours` returns whether a signature marks reasoning of this gateway's models.
    """
    ignored = read_ignored(body, Wire.MESSAGES)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "A non-empty list is required.")
    if len(messages) > ITEMS_LIMIT:
        raise _wrong("messages", f"At most {ITEMS_LIMIT} messages are allowed.")
    edits: Json = {}
    if body.get(CONTEXT_MANAGEMENT) is not None:
        messages, applied = edit_messages(body[CONTEXT_MANAGEMENT], messages)
        edits = {CONTEXT_MANAGEMENT: {"applied_edits": applied}}
    chat = same_fields(body)
    same = frozenset((*chat, TOOL_GRAMMARS))
    history = _History(messages, is_ours, reading)
    placed = [(one, ["system"]) for one in _system_of(body.get("system"), history.inside)]
    for index, message in enumerate(messages):
        some = [*history.messages_of(message, index)]
        if marks := marks_of(message):
            some = some or [({"role": message["role"], "content": ""}, [f"messages.{index}"])]
            some[-1][0].update(marks)
        placed += some
    history.inside.echoed = False
    chat["messages"] = [message for message, _ in placed]
    own: Json = {}
    continued = {"continue_final_message": placed[-1][1][0]} if placed else {}
    if placed and placed[-1][0]["role"] == "assistant":
        last, (at, *_) = placed[-1]
        if "tool_calls" in last and not marks_of(last):
            raise _wrong(at, "An answer can continue text, but not tool calls.")
        own |= {"add_generation_prompt": False, "continue_final_message": True}
    chat |= {name: body[name] for name in ("max_tokens", TOOL_GRAMMARS) if name in body}
    if body.get("stop_sequences"):
        own["stop"] = body["stop_sequences"]
    own |= _reasoning_of(body, history.inside) | _form_of(body)
    with_own(chat, own, _CHAT_NAMES)
    tools, tool_places, left_out = _tools_of(body, history)
    return MessagesChat(
        chat | tools,
        _CHAT_NAMES | continued,
        [places for _, places in placed],
        tool_places,
        left_out,
        tuple(history.replaced),
        same,
        (*ignored, *history.inside),
        edits=edits,
        breakpoint_in=_breakpoint_in(body),
    )


def _breakpoint_in(body: Mapping[str, Any]) -> str:
    contents = [one.get("content") for one in objects_of(body["messages"])]
    places = {"messages": ([body], *contents), "system": (body.get("system"), body.get("tools"))}
    for place, lists in places.items():
        if any(one.get("cache_control") is not None for some in lists for one in objects_of(some)):
            return place
    return ""


def _wrong(place: str, why: str) -> FieldError:
    """Return an error as Anthropic words them."""
    return FieldError(place, f"{place}: {why}")


def _system_of(system: Any, inside: Inside) -> Iterator[Json]:
    if system is None:
        return
    texts = [system] if isinstance(system, str) else _texts_of(system, "system", inside)
    for place, text in enumerate(texts):
        if text.startswith(_BILLING_MARK):
            texts[place] = text.partition("\n")[2].lstrip("\n")
    if text := _BETWEEN_TEXTS.join(filter(None, texts)):
        yield {"role": "system", "content": text}


def _texts_of(blocks: Any, where: str, inside: Inside) -> list[str]:
    texts = []
    for at, block in _blocks_of(blocks, where, inside):
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            raise _wrong(at, "A text block is required.")
        texts.append(block["text"])
    return texts


def _blocks_of(content: Any, where: str, inside: Inside) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each block with its place; add its ignored names to `inside`."""
    if not isinstance(content, list):
        raise _wrong(where, "A string or a list of blocks is required.")
    for index, block in enumerate(content):
        at = f"{where}.{index}"
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise _wrong(at, "A block with a type is required.")
        if block["type"] in _READ:
            check_keys("MESSAGES messages.content", block, inside, at)
            check_keys(
                "MESSAGES messages.content.source", block.get("source"), inside, f"{at}.source"
            )
        yield at, block


class _History(Replacements):
    """Translates messages; words replace the blocks that no model can read."""

    def __init__(
        self, messages: Sequence[Any], is_ours: Callable[[str, str], bool], reading: Readable
    ) -> None:
        super().__init__(reading)
        self.inside = Inside()
        """The ignored names inside fields."""
        self.available: dict[str, bool] = {}
        """By name, the tools that a search has found, or that a message adds or removes."""
        self.defined: dict[str, tuple[str, Any]] = {}
        """By name, the tools that messages define, each with its place."""
        self._is_ours = is_ours
        self._turn = last_turn(
            [one.get("role") if isinstance(one, Mapping) else None for one in messages]
        )

    def messages_of(self, message: Any, index: int) -> Iterator[tuple[Json, list[str]]]:
        """Yield the chat messages of one message, each with its place and those of its parts.

        Each result of a tool is a message of its own.
        """
        where = f"messages.{index}"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise _wrong(f"{where}.role", "It must be user, assistant or system.")
        self.inside.echoed = role == "assistant"
        check_keys("MESSAGES messages", message, self.inside, where)
        content = message.get("content")
        # A system message in the middle stays at its place: moved to the front, it would change the
        # beginning of the prompt, which is read already.
        if role == "system" and not self.reading.system_inside:
            role = "user"
        if isinstance(content, str):
            if content or role != "assistant":
                yield {"role": role, "content": content}, [where]
        elif role == "assistant":
            if reply := self._assistant_message(content, f"{where}.content"):
                yield reply, [where]
        else:
            new = index > self._turn
            yield from self._user_messages(content, f"{where}.content", role, new=new)

    def _assistant_message(self, content: Any, where: str) -> Json:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[Json] = []
        for at, block in _blocks_of(content, where, self.inside):
            match block["type"]:
                case "text":
                    texts.append(_text(block, "text", at))
                case "tool_use":
                    arguments = encode_text(block.get("input") or {})
                    name = _text(block, "name", at)
                    calls.append(call_of(_text(block, "id", at), name, arguments))
                case "thinking":
                    text = _text(block, "thinking", at)
                    # Another model's reasoning is none of this one's.
                    if self._is_ours(text, str(block.get("signature"))):
                        reasoning.append(text)
                case "redacted_thinking":
                    pass
                case kind:
                    texts.append(self.words(kind, at)["text"])
        return reply_of(texts, reasoning, calls)

    def _user_messages(
        self, content: Any, where: str, role: str, *, new: bool
    ) -> Iterator[tuple[Json, list[str]]]:
        placed: list[tuple[str, Json]] = []
        for at, block in _blocks_of(content, where, self.inside):
            if self._changes_tools(block, at):
                continue
            if block["type"] == "tool_result":
                parts = self._result_parts(block, at)
                text = f"Error: {texts_of(parts)}" if block.get("is_error") else texts_of(parts)
                call_id = _text(block, "tool_use_id", at)
                yield {"role": "tool", "tool_call_id": call_id, "content": text}, [at]
                # Templates take pictures from users alone.
                placed += [one for one in parts if one[1]["type"] != "text"]
            else:
                placed += [(at, part) for part in self._readable(block, at, new=new)]
        if placed:
            message, places = message_of(role, placed, where)
            if len(places) > 1:
                message["role"] = "user"
            yield message, places

    def _result_parts(self, block: Mapping[str, Any], at: str) -> list[tuple[str, Json]]:
        """Return the parts of the result of a tool, each with its place."""
        given = block.get("content") or ""
        if isinstance(given, str):
            return [(at, {"type": "text", "text": given})]
        placed = []
        for inner_at, inner in _blocks_of(given, f"{at}.content", self.inside):
            placed += [(inner_at, part) for part in self._readable(inner, inner_at, new=False)]
            if inner["type"] == "tool_reference":
                self.available[inner["tool_name"]] = True
        return placed

    def _changes_tools(self, block: Mapping[str, Any], at: str) -> bool:
        """Return whether a block adds or removes a tool that the model can have; do so."""
        match block:
            case {"type": "tool_addition" | "tool_removal" as kind, "tool": {"name": str(name)}}:
                self.available[name] = kind == "tool_addition"
            case {"type": "tool_addition", "tool": {"definition": {"name": str(name)} as tool}}:
                self.available[name] = True
                self.defined[name] = (f"{at}.tool.definition", tool)
            case _:
                return False
        return True

    def _readable(self, block: Mapping[str, Any], at: str, *, new: bool) -> list[Json]:
        """Return the parts of a chat for a block, or words in its place."""
        kind: str = block["type"]
        if (pdf := pdf_of(block)) is not None:
            return self.document(pdf, block.get("title"), kind, at, f"{at}.source", new=new)
        part = _part_of(block, at, self.inside)
        if new and part is None and isinstance(block.get("source"), Mapping):
            why = "It must be base64 or text; the gateway does not follow links or ids."
            raise _wrong(f"{at}.source.type", why)
        if new and part is None:
            raise _wrong(f"{at}.type", f"This gateway does not support '{kind[:100]}'.")
        return [self.part(part, kind, at, new=new)]


def is_own_block(kind: object) -> bool:
    """Return whether only messages, and not chats, can have blocks of this type."""
    return isinstance(kind, str) and (
        kind in ("tool_use", "thinking", "document", *_SERVICE_BLOCKS)
        or kind.endswith("tool_result")
    )


def _part_of(block: Mapping[str, Any], at: str, inside: Inside) -> Json | None:
    """Return the part of a chat for a block; None if chats lack it."""
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    match block["type"], source.get("type"):
        case "image", "base64":
            kind = _text(source, "media_type", f"{at}.source")
            data = _text(source, "data", f"{at}.source")
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case "image", "url":
            url = _text(source, "url", f"{at}.source")
            return {"type": "image_url", "image_url": {"url": url}}
        case "text", _:
            text = _text(block, "text", at)
        case "document", "text":
            text = _text(source, "data", f"{at}.source")
        case "tool_reference", _:
            text = f"Tool: {_text(block, 'tool_name', at)}"
        case "search_result", _:
            head = (
                one for one in (block.get("title"), block.get("source")) if isinstance(one, str)
            )
            texts = _texts_of(block.get("content") or [], f"{at}.content", inside)
            text = "\n".join((*head, *texts))
        case _:
            return None
    return {"type": "text", "text": text}


def _text(block: Mapping[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{at}.{name}", "A string is required.")
    return value


def _flag(given: Mapping[str, Any], name: str, at: str) -> bool:
    value = given.get(name)
    if not isinstance(value, bool | None):  # the text "false" would count as true
        raise _wrong(f"{at}.{name}", "It must be true or false.")
    return bool(value)


def _tools_of(
    body: Mapping[str, Any], history: _History
) -> tuple[Json, list[str], tuple[str, ...]]:
    """Return the tools and the choice among them, their places, and the tools left out.

    A deferred tool is absent until a search has found it, a message adds it, or the request chooses
    it.
    """
    tools = body.get("tools") or []
    choice = body.get("tool_choice")
    chosen_name = choice.get("name") if isinstance(choice, Mapping) else None
    functions: list[Json] = []
    places = []
    left_out = []
    # Tools that were found follow the others, whose part of the prompt stays the same.
    order = {name: number for number, name in enumerate(history.available)}
    placed = [one for one in _named(tools) if one[1]["name"] not in history.defined]
    placed += history.defined.values()
    for at, tool in sorted(placed, key=lambda one: order.get(one[1]["name"], -1)):
        if tool.get("type") not in (None, "custom"):
            left_out.append(named(at, str(tool["type"])))
            continue
        check_keys("MESSAGES tools", tool, history.inside, at)
        name = tool["name"]
        available = history.available.get(name, not _flag(tool, "defer_loading", at))
        if not available and name != chosen_name:
            continue
        function: Json = {"name": name, "parameters": tool.get("input_schema") or {}}
        function |= {name: tool[name] for name in ("description", "strict") if name in tool}
        functions.append({"type": "function", "function": function})
        places.append(at)
    chosen: Json = {"tools": functions} if functions else {}
    if choice is not None:
        chosen |= _choice_of(choice, {one["function"]["name"] for one in functions})
    return chosen, places, tuple(left_out)


def _choice_of(choice: Any, names: Set[str]) -> Json:
    """Translate the choice among the functions with these names."""
    check_keys("MESSAGES tool_choice", choice)
    chosen: Any
    match choice:
        case {"type": "tool", "name": str() as name} if name in names:
            chosen = {"type": "function", "function": {"name": name}}
        case {"type": "tool"}:
            raise _wrong("tool_choice.name", "It must be one of the tools that the client runs.")
        case {"type": "any"} if not names:
            raise _wrong("tool_choice", "The request has no tools to choose from.")
        case {"type": "auto" | "any" | "none" as kind}:
            chosen = "required" if kind == "any" else kind
        case _:
            raise _wrong("tool_choice.type", "It must be auto, any, tool or none.")
    single = _flag(choice, "disable_parallel_tool_use", "tool_choice")
    one_call = {"parallel_tool_calls": False} if single else {}
    return {"tool_choice": chosen, **one_call} if names else {}


def _named(tools: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(tools, list):
        raise _wrong("tools", "A list is required.")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise _wrong(f"tools.{index}", "A tool with a name is required.")
        yield f"tools.{index}", tool


def _reasoning_of(body: Mapping[str, Any], inside: Inside) -> Json:
    """Translate `thinking` and the effort; without either, a model that may reason does not."""
    output, thinking = Fields(body).object("output_config"), Fields(body).object("thinking")
    check_keys("MESSAGES output_config", output, inside)
    check_keys("MESSAGES thinking", thinking, inside)
    effort = output.get("effort")
    default = body.get(_EFFORT) or "high"
    display = thinking.get("display")
    if display not in (None, "summarized", "omitted", "updates"):
        raise _wrong("thinking.display", "It must be summarized, omitted or updates.")
    hidden: Json = {"include_reasoning": False} if display == "omitted" else {}
    match thinking.get("type"):
        case None:
            return {} if effort is None else {_EFFORT: effort}
        case "disabled":
            return {_EFFORT: "none"}
        case "adaptive":
            return {_EFFORT: effort or default, **hidden}
        case "enabled":
            budget = thinking.get("budget_tokens")
            return {_EFFORT: effort or default, "thinking_budget": budget, **hidden}
    raise _wrong("thinking.type", "It must be enabled, adaptive or disabled.")


def _form_of(body: Mapping[str, Any]) -> Json:
    form = Fields(body).object("output_config").get("format") or body.get("output_format")
    return form_of(form, "MESSAGES output_config.format", name="answer", strict=True)
