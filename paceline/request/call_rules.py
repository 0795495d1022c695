"""Which calls of tools an answer may have: by its `tools`, its `tool_choice` and their limits.

Models and engines write other calls too. Whoever reads an answer leaves these out.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.request.fields import FieldError
from paceline.request.keys import Inside, check_keys

MAX_TOOL_CALLS = "max_tool_calls"
"""Field of OpenAI's Responses: the most calls of an answer."""
_ALLOWED = "tool_choice.allowed_tools"


class CallRules(NamedTuple):
    """The calls that an answer may have."""

    names: frozenset[str] = frozenset()
    """The tools that it may call."""
    limit: int | None = None
    """The most calls; None: any number."""
    forced: bool = False
    """It must call one of the tools."""

    def admits(self, name: str, earlier: int) -> bool:
        """Return whether an answer may call a tool after so many calls."""
        return name in self.names and (self.limit is None or earlier < self.limit)


def read_call_rules(body: Mapping[str, Any]) -> CallRules:
    """Return the rules of a body whose tools have been checked; raise `FieldError`."""
    names = frozenset(tool["function"]["name"] for tool in body.get("tools") or ())
    limit = 1 if body.get("parallel_tool_calls") is False else body.get(MAX_TOOL_CALLS)
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        choice = {"type": "function", **choice}
    match choice:
        case None | "auto":
            return CallRules(names, limit)
        case "none":
            return CallRules()
        case "required":
            rules = CallRules(names, limit, forced=True)
        case {"type": "allowed_tools", **more}:
            allowed, mode = _allowed_of(more.get("allowed_tools"), names)
            rules = CallRules(allowed, limit, forced=mode == "required")
        case {"function": {"name": str() as name}, "type": "function"}:
            rules = CallRules(names & {name}, 1, forced=True)
        case _:
            problem = "'tool_choice' must be auto, none, required, a function or allowed tools."
            raise FieldError("tool_choice", problem)
    if rules.forced and not rules.names:
        raise FieldError("tool_choice", "'tool_choice' must choose one of 'tools'.")
    return rules


def _allowed_of(choice: Any, names: frozenset[str]) -> tuple[frozenset[str], str]:
    """Return the names of the allowed tools, and the mode of the choice among them."""
    match choice:
        case {"mode": "auto" | "required" as mode, "tools": [*tools]} if names:
            for index, tool in enumerate(tools):
                at = f"{_ALLOWED}.tools[{index}]"
                match tool:
                    case {"function": {"name": str() as name} as function} if name in names:
                        inside = Inside()  # it may be the whole tool, which `tools` has
                        check_keys("CHAT tools", tool, inside, at)
                        check_keys("CHAT tools.function", function, inside, f"{at}.function")
                    case _:
                        raise FieldError(at, "An allowed tool must be the name of one of 'tools'.")
            return frozenset(tool["function"]["name"] for tool in tools), mode
    problem = f"'{_ALLOWED}' must have the mode auto or required, and some of 'tools'."
    raise FieldError(_ALLOWED, problem)
