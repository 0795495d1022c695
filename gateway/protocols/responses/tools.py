"""The tools of a Responses request as functions of a chat, and the calls of a chat as items again.

A custom tool, whose input is plain text, becomes a function with one string argument. A namespace
becomes a prefix of its functions' names. A search for tools that the client runs is a function, and
the tools that it finds are tools of the request.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from gateway.types import Json
from paceline.request.constraint import TOOL_GRAMMARS
from paceline.request.fields import FieldError
from paceline.request.keys import Inside, check_keys
from paceline.request.parser import TOOLS_LIMIT, read_functions

HOSTED_TOOLS = frozenset(
    "web_search web_search_preview web_search_2025_08_26 web_search_preview_2025_03_11 file_search "
    "code_interpreter image_generation mcp computer computer_use computer_use_preview local_shell "
    "shell apply_patch tool_search programmatic_tool_calling".split()
)
"""Tools that run on OpenAI's servers, or whose calls only OpenAI's models write."""
INPUT = "input"
"""The argument that holds the text for a custom tool."""
_SEARCH = "tool_search"
_CALLS = {"function": "function_call", "custom": "custom_tool_call", _SEARCH: "tool_search_call"}
"""The types of the items that call a tool, by its type."""
_MODES = (None, "auto", "required")
"""How a choice of `allowed_tools` is to be made among them; None is auto."""
_JOINT = "__"
_NAME_CHARS = 128


class Tool(NamedTuple):
    """A tool as its client knows it, and as a function of a chat."""

    name: str
    namespace: str = ""
    kind: str = "function_call"
    """The type of the items that call it."""
    place: str = ""
    """The field of the request that declares it."""
    function: Mapping[str, Any] = {}
    grammar: Mapping[str, Any] | None = None
    """The form of the text for a custom tool, as `tool_grammars` of a chat has it."""


class ToolSet(NamedTuple):
    """The tools of a request, and the choice among them."""

    declared: Sequence[Mapping[str, Any]] = ()
    """As the client declares them, without omitted ones."""
    by_name: Mapping[str, Tool] = {}
    """By the names of the functions."""
    left_out: tuple[str, ...] = ()
    """The place and the type of each tool that is left out."""
    choice: Any = None
    """The `tool_choice` of the chat."""

    def origin(self, function: str) -> Tool:
        """Return the tool behind a function; an undeclared one is a function."""
        return self.by_name.get(function) or Tool(function)


def read_tools(
    body: Mapping[str, Any],
    items: Iterable[tuple[str, Mapping[str, Any]]],
    inside: Inside,
) -> ToolSet:
    """Read the tools of a body and the choice among them; raise `FieldError`.

    `items` are those of the chat, each with its place: they have the tools that the client found,
    which a request without the search does not want, such as one for a summary. Add their ignored
    names to `inside`.
    """
    tools = body.get("tools")
    if not isinstance(tools, list | None):
        raise must("tools", "be a list")
    declared: list[Mapping[str, Any]] = []
    by_name: dict[str, Tool] = {}
    left_out: list[str] = []
    for index, tool in enumerate(tools or ()):
        at = f"tools[{index}]"
        if kind_of(tool, at) in HOSTED_TOOLS and not _is_clients(tool):
            left_out.append(f"{at}:{tool['type']}")
            continue
        declared.append(tool)
        for name, one in _tools_in(tool, at, inside):
            if by_name.setdefault(name, one)._replace(place=one.place) != one:
                problem = f"Two different tools are called '{name}'."
                raise FieldError(f"{one.place}.name", problem)
            if len(by_name) > TOOLS_LIMIT:  # before each gets a place in the chat
                raise must("tools", f"be a list of at most {TOOLS_LIMIT}")
    for at, item in items if any(map(_is_clients, declared)) else ():
        for name, one in _found_tools(item, at):
            if len(by_name) < TOOLS_LIMIT:
                by_name.setdefault(name, one)
    choice = _chosen(by_name, body.get("tool_choice"))
    return ToolSet(declared, by_name, tuple(left_out), choice)


def found_names(item: Mapping[str, Any], at: str) -> list[str]:
    """Return the names of the functions for the tools that a search of the client found."""
    return [name for name, _ in _found_tools(item, at)]


def must(place: str, what: str) -> FieldError:
    """Return an error as OpenAI words them."""
    return FieldError(place, f"'{place}' must {what}.")


def kind_of(value: Any, at: str) -> str:
    """Return the type of an object; raise `FieldError`."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str):
        raise FieldError(f"{at}.type", f"'{at}' must be an object with a 'type'.")
    return kind


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of the function for a tool of a namespace."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith(_JOINT) else _JOINT) + name


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return to_json({INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return the text that a model means by the arguments of a custom tool's function.

    Where no schema forces the model, it may write another name, or the bare text. Arguments that a
    limit has cut off have the beginning of the text.
    """
    try:
        given = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    if isinstance(given, str):
        return given
    if given == {}:
        return ""
    if isinstance(given, dict):
        if isinstance(given.get(INPUT), str):
            return str(given[INPUT])
        texts = [value for value in given.values() if isinstance(value, str)]
        if len(given) == len(texts) == 1:
            return texts[0]
    return arguments


def _is_clients(tool: Mapping[str, Any]) -> bool:
    return tool["type"] == _SEARCH and tool.get("execution") == "client"


def _found_tools(item: Mapping[str, Any], at: str) -> Iterator[tuple[str, Tool]]:
    """Yield the tools of an item that a chat can have."""
    tools = item.get("tools") if item["type"] == f"{_SEARCH}_output" else None
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        with contextlib.suppress(FieldError):
            place = f"{at}.tools[{index}]"
            kind_of(tool, place)
            for name, one in _tools_in(tool, place, Inside()):
                grammars = {name: one.grammar} if one.grammar else None
                read_functions({"tools": [one.function], TOOL_GRAMMARS: grammars}, Inside())
                yield name, one


def _tools_in(tool: Mapping[str, Any], at: str, inside: Inside) -> Iterator[tuple[str, Tool]]:
    """Yield a tool, or those of a namespace, by the names of their functions."""
    check_keys("RESPONSES tools", tool, inside, at)
    if tool["type"] != "namespace":
        yield _tool_of(tool, "", at)
        return
    namespace, members = _name(tool, at), tool.get("tools")
    if not isinstance(members, list):
        raise must(f"{at}.tools", "be a list")
    for index, member in enumerate(members):
        place = f"{at}.tools[{index}]"
        kind_of(member, place)
        check_keys("RESPONSES tools", member, inside, place)
        yield _tool_of(member, namespace, place)


def _tool_of(tool: Mapping[str, Any], namespace: str, at: str) -> tuple[str, Tool]:
    kind = tool["type"]
    if kind not in _CALLS:
        problem = f"'{at}.type' is '{kind[:100]}'; it must be function or custom."
        raise FieldError(f"{at}.type", problem)
    name = _SEARCH if kind == _SEARCH else _name(tool, at)
    description, grammar = tool.get("description"), None
    if not isinstance(description, str | None):
        raise must(f"{at}.description", "be a string")
    function: Json = {"name": flat_name(name, namespace)}
    if kind in ("function", _SEARCH):
        given, bare = tool.get("parameters"), {"type": "object", "properties": {}}
        function["parameters"] = bare if given in (None, {}) else given
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
    else:
        grammar = _grammar_of(tool, f"{at}.format")
        text, hint = _custom_input_schema(grammar)
        description = "\n\n".join(filter(None, (description, hint)))
        function["parameters"] = {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        }
    if description:
        function["description"] = description
    declared: Json = {"type": "function", "function": function}
    return function["name"], Tool(name, namespace, _CALLS[kind], at, declared, grammar)


def _grammar_of(tool: Mapping[str, Any], at: str) -> Mapping[str, Any] | None:
    """Return the grammar of a custom tool's text; raise `FieldError`."""
    form = tool.get("format")
    check_keys("RESPONSES tools.format", form, path=at)
    if form is None or kind_of(form, at) == "text":
        return None
    if form["type"] != "grammar":
        raise must(f"{at}.type", "be text or grammar")
    return {name: form.get(name) for name in ("syntax", "definition")}


def _custom_input_schema(grammar: Mapping[str, Any] | None) -> tuple[Json, str]:
    """Return the schema of a custom tool's text, and a description of its form.

    Engines without grammars of tools only have this description.
    """
    if grammar is None:
        return {"type": "string"}, ""
    definition = grammar["definition"]
    if grammar["syntax"] == "lark":
        return {"type": "string"}, f"'{INPUT}' must match this Lark grammar:\n{definition}"
    hint = f"'{INPUT}' must match this regular expression: {definition}"
    return {"type": "string", "pattern": f"^(?:{definition})$"}, hint


def _name(tool: Mapping[str, Any], at: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARS:
        raise must(f"{at}.name", f"be a string of 1 to {_NAME_CHARS} characters")
    return name


def _chosen(tools: Mapping[str, Tool], choice: Any) -> Any:
    """Return the choice of the chat for a choice among tools."""
    check_keys("RESPONSES tool_choice", choice)
    match choice:
        case None | "auto" | "none":
            return choice
        case "required" if tools:
            return choice
        case {"type": "function" | "custom"}:
            return _function(_reference(tools, choice, "tool_choice"))
        case {"type": "allowed_tools", "tools": [*allowed]} if choice.get("mode") in _MODES:
            # A hosted tool among them is left out as everywhere.
            functions = [
                _function(_reference(tools, one, f"tool_choice.tools[{index}]"))
                for index, one in enumerate(allowed)
                if kind_of(one, f"tool_choice.tools[{index}]") not in HOSTED_TOOLS
            ]
            chosen = {"mode": choice.get("mode") or "auto", "tools": functions}
            return {"type": "allowed_tools", "allowed_tools": chosen} if functions else "none"
        case "required":
            raise must("tool_choice", "choose one of 'tools'")
        case {"type": str() as kind} if kind in HOSTED_TOOLS:
            raise FieldError("tool_choice.type", f"This gateway does not run '{kind}'.")
    kinds = "auto, none, required, or an object of the type function, custom or allowed_tools"
    raise must("tool_choice", f"be {kinds}")


def _function(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def _reference(tools: Mapping[str, Tool], reference: Mapping[str, Any], at: str) -> str:
    """Return the function that a reference to a tool names; raise `FieldError`."""
    check_keys(f"RESPONSES {at.partition('[')[0]}", reference, Inside(), at)
    name = flat_name(_name(reference, at), reference.get("namespace"))
    if name not in tools:
        raise must(f"{at}.name", "be the name of one of 'tools'")
    return name
