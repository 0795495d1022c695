"""OpenAI's functions of 2023, which tools replaced: `functions`, `function_call`, role `function`.

Workers support only tools. A body with functions becomes one with tools, and the call of the answer
becomes a `function_call` again. Such an answer has one call at most.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.strict_json import objects_of
from paceline.request.fields import FieldError


def with_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with tools in place of functions; raise `FieldError` for invalid ones."""
    modern = dict(body)
    if body.get("functions"):
        functions, choice = body["functions"], body.get("function_call")
        if body.get("tools") is not None or body.get("tool_choice") is not None:
            raise FieldError("functions", "Use either 'functions' or 'tools', not both.")
        if not isinstance(functions, list):
            raise FieldError("functions", "'functions' must be a list.")
        for index, function in enumerate(functions):
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise FieldError(f"functions[{index}]", "Each function must have a name.")
        del modern["functions"]
        modern.pop("function_call", None)
        modern["tools"] = [{"type": "function", "function": function} for function in functions]
        modern["parallel_tool_calls"] = False
        if isinstance(choice, Mapping) and isinstance(choice.get("name"), str):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        elif choice not in (None, "auto", "none"):
            problem = "'function_call' must be auto or none, or name a function."
            raise FieldError("function_call", problem)
        if choice is not None:
            modern["tool_choice"] = choice
    if isinstance(messages := body.get("messages"), list):
        modern["messages"] = _messages(messages)
    return modern


def _messages(messages: Sequence[Any]) -> list[Any]:
    """Return the messages with calls of tools and their results; others are the parser's."""
    modern: list[Any] = []
    calls: dict[str, str] = {}
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            modern.append(message)
            continue
        changed = dict(message)
        call = changed.pop("function_call", None)
        if isinstance(call, Mapping) and not message.get("tool_calls"):
            name = str(call.get("name"))
            calls[name] = f"function{index}"
            changed["tool_calls"] = [{"id": calls[name], "type": "function", "function": call}]
        if message.get("role") == "function":
            name = str(message.get("name"))
            changed |= {"role": "tool", "tool_call_id": calls.get(name, f"function{index}")}
        modern.append(changed)
    return modern


def as_function_call(choices: Any, part: str) -> bool:
    """Replace the tool calls of choices by a function call; return whether there were any.

    `part` is their place in a choice: `message`, or the `delta` of a stream.
    """
    changed = False
    for choice in objects_of(choices):
        message = choice.get(part)
        if isinstance(message, dict) and (calls := message.pop("tool_calls", None)):
            changed = True
            message["function_call"] = calls[0].get("function")
        if choice.get("finish_reason") == "tool_calls":
            changed = True
            choice["finish_reason"] = "function_call"
    return changed
