"""A request for a message as a request for a chat."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from gateway.protocols.documents import DocumentUnreadable, Readable, pdf_of, words_for_pdf
from gateway.protocols.history import named, unreadable_pdf, words_for
from gateway.protocols.messages.context_management import FIELD as CONTEXT_MANAGEMENT
from gateway.protocols.messages.context_management import edit_messages
from gateway.strict_json import ITEMS_LIMIT, encode_text
from paceline.request.fields import CACHE_SALT, FieldError, Fields
from paceline.request.profile import REASONING_EFFORTS

Json = dict[str, Any]

_SAME_FIELDS = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", CACHE_SALT)
IGNORED_FIELDS = frozenset(
    "metadata service_tier container inference_geo speed cache_control diagnostics billing_policy "
    "fallbacks fallback_credit_token user_profile_id workspace_id".split()
)
"""They choose among Anthropic's services and accounts."""
FIELDS = IGNORED_FIELDS.union(
    _SAME_FIELDS,
    "messages system tools tool_choice stop_sequences thinking output_config output_format "
    "context_management mcp_servers thread compaction".split(),
)
# Claude Code writes a digest of each request there, so that no two prompts would begin alike.
_BILLING_MARK = "x-anthropic-billing-header"
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SERVICE_BLOCKS = ("redacted_thinking", "server_tool_use", "mcp_tool_use")
"""With the results of its tools, what Anthropic's own service writes for itself."""
_REFERENCE = "tool_reference"
_CHAT_NAMES = {
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
    "include_reasoning": "thinking.display",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tools.function.strict": "tools.strict",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_IN_MESSAGE = re.compile(r"messages\[(?P<message>\d+)\](\.content\[(?P<part>\d+)\])?.*")
_IN_TOOL = re.compile(r"tools\[(?P<tool>\d+)\](\.function)?(?P<rest>.*)")
_BETWEEN_TEXTS = "\n\n"


class MessagesChat(NamedTuple):
    """A request for `/v1/chat/completions`."""

    body: Json
    applied_edits: Sequence[Json] | None = None
    """What `context_management` cleared; None if the request has no such field."""
    left_out: tuple[str, ...] = ()
    """The place and the type of each tool that Anthropic's servers alone run."""
    replaced: tuple[str, ...] = ()
    """The place and the type of each block that words replace."""
    places: Sequence[Sequence[str]] = ()
    """Of each message of the chat, the place in the request, then those of its parts."""
    tool_places: Sequence[str] = ()

    def param(self, name: str) -> str:
        """Return the field of the request behind a field of the chat."""
        if (found := _IN_MESSAGE.fullmatch(name)) and int(found["message"]) < len(self.places):
            place, *parts = self.places[int(found["message"])]
            part = int(found["part"]) if found["part"] else len(parts)
            return parts[part] if part < len(parts) else place
        if (found := _IN_TOOL.fullmatch(name)) and int(found["tool"]) < len(self.tool_places):
            return self.tool_places[int(found["tool"])] + found["rest"].replace(
                ".parameters", ".input_schema"
            )
        if name == "continue_final_message":
            return self.places[-1][0]
        for chat_name, own_name in _CHAT_NAMES.items():
            if name == chat_name or name.startswith(f"{chat_name}."):
                return own_name + name[len(chat_name) :]
        return name

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

    `is_ours` tells whether a signature marks reasoning of this gateway's models.
    """
    for name in body:
        if name not in FIELDS:
            raise FieldError(name[:100], f"{name[:100]}: Extra inputs are not permitted.")
    if body.get("mcp_servers"):
        raise FieldError("mcp_servers", "mcp_servers: This gateway calls no MCP servers.")
    if body.get("compaction") is not None:
        raise FieldError("compaction", "compaction: This gateway compacts no conversations.")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", "messages: A non-empty list is required.")
    if len(messages) > ITEMS_LIMIT:
        raise FieldError("messages", f"messages: At most {ITEMS_LIMIT} messages are allowed.")
    applied = None
    if body.get(CONTEXT_MANAGEMENT) is not None:
        messages, applied = edit_messages(body[CONTEXT_MANAGEMENT], messages)
    chat: Json = {name: body[name] for name in _SAME_FIELDS if body.get(name) is not None}
    placed = [(one, ["system"]) for one in _system_of(body.get("system"))]
    history = _History(messages, is_ours, reading)
    for index, message in enumerate(messages):
        placed += history.messages_of(message, index)
    chat["messages"] = [message for message, _ in placed]
    if placed and placed[-1][0]["role"] == "assistant":
        last, (at, *_) = placed[-1]
        if "tool_calls" in last:
            raise FieldError(at, f"{at}: An answer goes on from text, and not from tool calls.")
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    tools, tool_places, left_out = _tools_of(body, history)
    chat |= tools | _reasoning_of(body) | _form_of(body)
    all_places = [places for _, places in placed]
    return MessagesChat(chat, applied, left_out, tuple(history.replaced), all_places, tool_places)


def _system_of(system: Any) -> Iterator[Json]:
    if system is None:
        return
    texts = [system] if isinstance(system, str) else _texts_of(system, "system")
    text = _BETWEEN_TEXTS.join(filter(None, map(_without_billing_line, texts)))
    if text:
        yield {"role": "system", "content": text}


def _without_billing_line(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING_MARK) else text


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


class _History:
    """Translates messages; words replace the blocks that no model can read.

    Only what the user says in this turn is refused if the model cannot read it: a client sends
    everything else again with each turn, and so could never go on.
    """

    def __init__(
        self, messages: Sequence[Any], is_ours: Callable[[str, str], bool], reading: Readable
    ) -> None:
        self.replaced: list[str] = []
        self.available: dict[str, bool] = {}
        """By name, the tools that a search has found, or that a message adds or removes."""
        self.defined: dict[str, tuple[str, Any]] = {}
        """By name, the tools that messages define, each with its place."""
        self._is_ours = is_ours
        self._reading = reading
        roles = [one.get("role") if isinstance(one, Mapping) else None for one in messages]
        self._turn = max((i for i, role in enumerate(roles) if role == "assistant"), default=-1)
        """The last message of the assistant: what follows is new."""

    def messages_of(self, message: Any, index: int) -> Iterator[tuple[Json, list[str]]]:
        """Yield the chat messages of one message, each with its place and those of its parts.

        Each result of a tool is a message of its own.
        """
        where = f"messages.{index}"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise FieldError(
                f"{where}.role", f"{where}.role: It must be user, assistant or system."
            )
        content = message.get("content")
        # A system message in the middle stays at its place: moved to the front, it would change the
        # beginning of the prompt, which is read already.
        if role == "system" and not self._reading.system_inside:
            role = "user"
        if isinstance(content, str):
            if content or role != "assistant":
                yield {"role": role, "content": content}, [where]
        elif role == "assistant":
            for one in self._assistant_message(content, f"{where}.content"):
                yield one, [where]
        else:
            new = index > self._turn
            yield from self._user_messages(content, f"{where}.content", role, new=new)

    def _assistant_message(self, content: Any, where: str) -> Iterator[Json]:
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
                        "arguments": encode_text(block.get("input") or {}),
                    }
                    calls.append(
                        {"id": _text(block, "id", at), "type": "function", "function": function}
                    )
                case "thinking":
                    text = _text(block, "thinking", at)
                    # Another model's reasoning is none of this one's.
                    if self._is_ours(text, str(block.get("signature"))):
                        reasoning.append(text)
                case "redacted_thinking":
                    pass
                case kind:
                    texts.append(self._replace(kind, at))
        message: Json = {"role": "assistant", "content": "".join(texts) or None}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        if texts or calls or reasoning:
            yield message

    def _user_messages(
        self, content: Any, where: str, role: str, *, new: bool
    ) -> Iterator[tuple[Json, list[str]]]:
        parts: list[Json] = []
        places = [where]
        for at, block in _blocks_of(content, where):
            if self._changes_tools(block, at):
                continue
            if block["type"] == "tool_result":
                placed = self._result_parts(block, at)
                yield _result_of(block, placed, at), [at]
                # Templates take pictures from users alone.
                placed = [one for one in placed if one[1]["type"] != "text"]
            else:
                placed = [(at, part) for part in self._readable(block, at, new=new)]
            places += [place for place, _ in placed]
            parts += [part for _, part in placed]
        if parts and all(part["type"] == "text" for part in parts):
            text = _BETWEEN_TEXTS.join(part["text"] for part in parts)
            yield {"role": role, "content": text}, [where]
        elif parts:
            yield {"role": "user", "content": parts}, places

    def _result_parts(self, block: Mapping[str, Any], at: str) -> list[tuple[str, Json]]:
        """Return the parts of the result of a tool, each with its place."""
        given = block.get("content") or ""
        if isinstance(given, str):
            return [(at, {"type": "text", "text": given})]
        placed = []
        for inner_at, inner in _blocks_of(given, f"{at}.content"):
            placed += [(inner_at, part) for part in self._readable(inner, inner_at, new=False)]
            if inner["type"] == _REFERENCE:
                self.available[inner["tool_name"]] = True
        return placed

    def _changes_tools(self, block: Mapping[str, Any], at: str) -> bool:
        """Return whether a block adds or removes a tool that the model can have; do so."""
        match block:
            case {
                "type": "tool_addition" | "tool_removal" as kind,
                "tool": {"name": str() as name},
            }:
                self.available[name] = kind == "tool_addition"
            case {"type": "tool_addition", "tool": {"definition": {"name": str() as name} as tool}}:
                self.available[name] = True
                self.defined[name] = (f"{at}.tool.definition", tool)
            case _:
                return False
        return True

    def _readable(self, block: Mapping[str, Any], at: str, *, new: bool) -> list[Json]:
        """Return the parts of a chat for a block, or words in its place."""
        if (pdf := pdf_of(block)) is not None:
            try:
                return self._reading.document(pdf, block.get("title"))
            except DocumentUnreadable as problem:
                if new:
                    raise unreadable_pdf(f"{at}.source", problem) from None
                words = self._replace(block["type"], at, words_for_pdf(str(problem)))
                return [{"type": "text", "text": words}]
        part = _part_of(block, at)
        if new and part is None:
            raise _unsupported(block, at)
        if part is not None and (new or part["type"] == "text" or self._reading.takes(part)):
            return [part]
        return [{"type": "text", "text": self._replace(block["type"], at)}]

    def _replace(self, kind: str, at: str, words: str = "") -> str:
        self.replaced.append(named(at, kind))
        return words or words_for(kind)


def is_own_block(kind: object) -> bool:
    """Return whether messages alone have blocks of this type, and chats have none."""
    return isinstance(kind, str) and (
        kind in ("tool_use", "thinking", "document", *_SERVICE_BLOCKS)
        or kind.endswith("tool_result")
    )


def _part_of(block: Mapping[str, Any], at: str) -> Json | None:
    """Return the part of a chat for a block; None if chats have none."""
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    match block["type"], source.get("type"):
        case "text", _:
            return {"type": "text", "text": _text(block, "text", at)}
        case "image", "base64":
            kind = _text(source, "media_type", f"{at}.source")
            data = _text(source, "data", f"{at}.source")
            return _picture(f"data:{kind};base64,{data}")
        case "image", "url":
            return _picture(_text(source, "url", f"{at}.source"))
        case "document", "text":
            return {"type": "text", "text": _text(source, "data", f"{at}.source")}
    text = _other_text(block, at)
    return None if text is None else {"type": "text", "text": text}


def _picture(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def _other_text(block: Mapping[str, Any], at: str) -> str | None:
    """Return the text of a block that is not text alone; None if it has none."""
    if block["type"] == _REFERENCE:
        return f"Tool: {_text(block, 'tool_name', at)}"
    if block["type"] == "search_result":
        head = [one for one in (block.get("title"), block.get("source")) if isinstance(one, str)]
        return "\n".join((*head, *_texts_of(block.get("content") or [], f"{at}.content")))
    return None


def _result_of(block: Mapping[str, Any], placed: Sequence[tuple[str, Json]], at: str) -> Json:
    """Return the message with the result of a tool, which is text alone."""
    text = _BETWEEN_TEXTS.join(part["text"] for _, part in placed if part["type"] == "text")
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", at), "content": text}


def _text(block: Mapping[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise FieldError(f"{at}.{name}", f"{at}.{name}: A string is required.")
    return value


def _unsupported(block: Mapping[str, Any], at: str) -> FieldError:
    return FieldError(
        f"{at}.type", f"{at}.type: This gateway does not support '{block['type'][:100]}'."
    )


def _tools_of(
    body: Mapping[str, Any], history: _History
) -> tuple[Json, list[str], tuple[str, ...]]:
    """Return the tools and the choice among them, their places, and the tools left out.

    A deferred tool is none until a search has found it, a message adds it, or the request chooses
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
    placed = [*_named(tools), *history.defined.values()]
    for at, tool in sorted(placed, key=lambda one: order.get(one[1]["name"], -1)):
        if tool.get("type") not in (None, "custom"):
            left_out.append(named(at, str(tool["type"])))
            continue
        name = tool["name"]
        available = history.available.get(name, not tool.get("defer_loading"))
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
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    chosen: Json = {}
    if kind == "tool":
        name = choice.get("name")
        if not isinstance(name, str) or name not in names:
            raise FieldError(
                "tool_choice.name",
                "tool_choice.name: It must be one of the tools that the client runs.",
            )
        chosen["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _TOOL_CHOICES:
        if kind == "any" and not names:
            raise FieldError("tool_choice", "tool_choice: There are no tools to choose among.")
        chosen["tool_choice"] = _TOOL_CHOICES[kind]
    else:
        raise FieldError(
            "tool_choice.type", "tool_choice.type: It must be auto, any, tool or none."
        )
    if choice.get("disable_parallel_tool_use"):
        chosen["parallel_tool_calls"] = False
    return chosen if names else {}


def _named(tools: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(tools, list):
        raise FieldError("tools", "tools: A list is required.")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise FieldError(f"tools.{index}", f"tools.{index}: A tool with a name is required.")
        yield f"tools.{index}", tool


def _reasoning_of(body: Mapping[str, Any]) -> Json:
    """Translate `thinking` and the effort; without either, a model that may reason does not."""
    effort = Fields(body).object("output_config").get("effort")
    if effort is not None and effort not in REASONING_EFFORTS:
        raise FieldError(
            "output_config.effort", f"output_config.effort: It must be one of {REASONING_EFFORTS}."
        )
    thinking = Fields(body).object("thinking")
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
    form = Fields(body).object("output_config").get("format") or body.get("output_format")
    if form is None:
        return {}
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise FieldError(
            "output_config.format", "output_config.format: Its type must be json_schema."
        )
    schema = {"name": "answer", "strict": True, "schema": form.get("schema")}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
