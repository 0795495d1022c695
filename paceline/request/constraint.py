"""The form that a request prescribes for its answer, in the spellings of OpenAI and of vLLM."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic_core import from_json

from paceline.request.call_rules import CallRules, read_call_rules
from paceline.request.fields import FieldError, Fields
from paceline.request.keys import check_keys

_MAX_LEVELS = 32
"""No useful schema has more levels."""
_MAX_CHARS = 64 * 1024
_MAX_CHOICES = 1024


class ConstraintKind(StrEnum):
    """The ways to prescribe a form; the values are vLLM's."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    CALLS = "calls"
    """Only calls of tools, for which vLLM lacks a field."""
    STRICT_TOOLS = "strict_tools"
    """Any text, and calls whose arguments have the form of their tool; no field of vLLM either."""


_VLLM_KINDS = frozenset(ConstraintKind) - {ConstraintKind.CALLS, ConstraintKind.STRICT_TOOLS}
_MAX_CALLS = 16
TOOL_GRAMMARS = "tool_grammars"
"""Field of a chat: the grammars of texts that functions take, by the functions' names."""
_SYNTAXES = ("lark", "regex")
_OPTIONS: Mapping[str, tuple[bool, ...]] = {
    "disable_fallback": (False, True),  # there is one backend
    "disable_any_whitespace": (False, True),  # JSON has no free white space
    "disable_additional_properties": (False,),
    "json_object": (False,),
}
"""The options of vLLM's `structured_outputs`, with the values that change no answer."""


class Constraint(NamedTuple):
    """The prescribed form of one answer."""

    kind: ConstraintKind
    value: Any
    """A JSON Schema, an expression, a list of texts, or a grammar as Lark or llama.cpp write it.

    For calls, their `limit`, the parameters of all `functions` by name, and the `grammars` of
    functions with a text of a prescribed form; for forced calls also which functions are `strict`,
    and for strict tools the `style` of the model's calls.
    """
    param: str
    """Path of the field that holds it, for errors."""
    tools: tuple[str, ...] = ()
    """The names of all tools of the request; a path has the index of one."""


def read_constraint(body: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of a body, or None; raise `FieldError` if it is malformed.

    A forced call of a tool comes before any other form, because its answer contains no text.
    """
    constraints = [*_from_response_format(body), *_from_vllm_fields(body)]
    if len(constraints) > 1:
        raise FieldError(
            constraints[1].param,
            f"'{constraints[1].param}' and '{constraints[0].param}' both prescribe the answer.",
        )
    if (rules := read_call_rules(body)).forced:
        return _calls_of(body, rules, ConstraintKind.CALLS)[0]
    return constraints[0] if constraints else None


def strict_tools(body: Mapping[str, Any], style: str) -> Constraint | None:
    """Return the constraint of free calls if some are strict, or not all are allowed.

    A function with a grammar is strict too. The tools have been checked.
    """
    calls, functions = _calls_of(body, read_call_rules(body), ConstraintKind.STRICT_TOOLS)
    strict = {*calls.value["strict"], *calls.value["grammars"]}
    if not strict and len(functions) in (0, len({*calls.tools})):
        return None
    forms = {
        name: (one or {"additionalProperties": False}) if name in strict else {}
        for name, one in functions.items()
    }
    del calls.value["strict"]
    return calls._replace(value={**calls.value, "functions": forms, "style": style})


def call_fields(body: Mapping[str, Any], constraint: Constraint | None) -> tuple[str, ...]:
    """Return the fields that prescribe calls which the model may write; the tools were checked.

    Forced calls hold to them with every model, and `constraint` then says so.
    """
    forced = constraint is not None and constraint.kind is ConstraintKind.CALLS
    if forced or body.get("tool_choice") == "none":
        return ()
    strict = any(tool["function"].get("strict") is True for tool in body.get("tools") or ())
    given = {"tools.function.strict": strict, TOOL_GRAMMARS: body.get(TOOL_GRAMMARS)}
    return tuple(name for name, value in given.items() if value)


def check_tool_grammars(body: Mapping[str, Any]) -> None:
    """Check the grammars of functions; the tools have been checked. Raise `FieldError`."""
    grammars = body.get(TOOL_GRAMMARS)
    if grammars is None:
        return
    if not isinstance(grammars, Mapping):
        raise FieldError(TOOL_GRAMMARS, f"'{TOOL_GRAMMARS}' must be an object.")
    tools = [tool["function"] for tool in body.get("tools") or ()]
    functions = {function["name"]: function for function in tools}
    for name, grammar in grammars.items():
        if name not in functions:
            raise FieldError(
                TOOL_GRAMMARS, f"'{TOOL_GRAMMARS}' names '{name[:100]}', which is not in 'tools'."
            )
        param = f"{TOOL_GRAMMARS}.{name}"
        if text_argument(functions[name].get("parameters")) is None:
            raise FieldError(param, f"'{param}' must be a function with only a string argument.")
        fields = grammar if isinstance(grammar, Mapping) else {}
        if fields.keys() != {"syntax", "definition"} or fields["syntax"] not in _SYNTAXES:
            param += ".syntax"
            raise FieldError(param, f"'{param}' must be one of {_SYNTAXES}, with a 'definition'.")
        definition = fields["definition"]
        if not isinstance(definition, str) or not 0 < len(definition) <= _MAX_CHARS:
            raise FieldError(
                f"{param}.definition",
                f"'{param}.definition' must be a string of 1 to {_MAX_CHARS} characters.",
            )


def text_argument(parameters: Any) -> str | None:
    """Return the argument of a function that takes one text and nothing else."""
    match parameters:
        case {"properties": {**properties}, "required": [str() as name]} if len(properties) == 1:
            text = properties.get(name)
            return name if isinstance(text, Mapping) and text.get("type") == "string" else None
    return None


def _calls_of(
    body: Mapping[str, Any], rules: CallRules, kind: ConstraintKind
) -> tuple[Constraint, Mapping[str, Any]]:
    """Return a constraint of calls, and the parameters of all functions; the tools were checked."""
    tools = [tool["function"] for tool in body.get("tools") or ()]
    functions = {one["name"]: one.get("parameters") or {} for one in tools}
    functions = {name: one for name, one in functions.items() if name in rules.names}
    grammars = body.get(TOOL_GRAMMARS) or {}
    value = {
        "limit": min(rules.limit or _MAX_CALLS, _MAX_CALLS),
        "functions": functions,
        "grammars": {name: one for name, one in grammars.items() if name in functions},
        "strict": [
            one["name"] for one in tools if one["name"] in functions and one.get("strict") is True
        ],
    }
    return Constraint(kind, value, "tools", tuple(one["name"] for one in tools)), functions


def _from_response_format(body: Mapping[str, Any]) -> Iterator[Constraint]:
    chosen = body.get("response_format")
    if chosen is None:
        return
    check_size(chosen, "response_format")
    kinds = ("text", "json_object", "json_schema")
    kind = chosen.get("type") if isinstance(chosen, Mapping) else None
    if kind not in kinds:
        place = "response_format.type"
        raise FieldError(place, f"'{place}' must be one of {kinds}.")
    check_keys("CHAT response_format", chosen)
    inner, schema = chosen.get("json_schema"), chosen.get("schema")
    of_type = {"json_schema": kind == "json_schema" and schema is None, "schema": kind != "text"}
    for name, fits in of_type.items():
        if chosen.get(name) is not None and not fits:
            place = f"response_format.{name}"
            problem = f"'{place}' has no use of the type {kind}, or beside another schema."
            raise FieldError(place, problem)
    if schema is not None:  # llama.cpp has it beside either type
        yield _constraint(ConstraintKind.JSON, schema, "response_format.schema")
    elif kind == "json_object":
        yield Constraint(ConstraintKind.JSON, {"type": "object"}, "response_format")
    elif kind == "json_schema":
        name = "response_format.json_schema"
        if not isinstance(inner, Mapping):
            raise FieldError(name, f"'{name}' must be an object with a 'schema'.")
        check_keys("CHAT response_format.json_schema", inner)
        yield _constraint(ConstraintKind.JSON, inner.get("schema"), f"{name}.schema")


def _from_vllm_fields(body: Mapping[str, Any]) -> Iterator[Constraint]:
    for kind in sorted(_VLLM_KINDS):
        name = f"guided_{kind}"
        if body.get(name) is not None:
            yield _constraint(kind, body[name], name)
    for name, value in Fields(body).object("structured_outputs").items():
        param = f"structured_outputs.{name[:100]}"
        if value is None or (isinstance(value, bool) and value in _OPTIONS.get(name, ())):
            continue
        if name == "json_object" and value is True:
            yield Constraint(ConstraintKind.JSON, {"type": "object"}, param)
        elif name in _VLLM_KINDS:
            yield _constraint(ConstraintKind(name), value, param)
        else:
            raise FieldError(param, f"'{param}' is not supported.")


def _constraint(kind: ConstraintKind, value: Any, param: str) -> Constraint:
    """Check the type and the size of a value."""
    check_size(value, param)
    if kind is ConstraintKind.CHOICE:
        texts = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
        if not texts or not 1 <= len(value) <= _MAX_CHOICES:
            raise FieldError(
                param, f"'{param}' must be a list of 1 to {_MAX_CHOICES} non-empty strings."
            )
    elif kind is ConstraintKind.JSON:
        if isinstance(value, str):  # vLLM takes the text of a schema too
            try:
                value = from_json(value, allow_inf_nan=False)
            except ValueError:
                value = None
            check_size(value, param)
        if not isinstance(value, Mapping | bool):
            raise FieldError(param, f"'{param}' must be a JSON Schema.")
    elif not isinstance(value, str) or not value:
        raise FieldError(param, f"'{param}' must be a non-empty string.")
    return Constraint(kind, value, param)


def check_size(schema: Any, param: str) -> None:
    """Reject a value that is too deep or too long, because compiling it would take too long."""
    level, depth, size = [schema], 0, 0
    while level:
        depth += 1
        deeper: list[Any] = []
        for node in level:
            if isinstance(node, Mapping):
                size += sum(map(len, node))
                deeper += node.values()
            elif isinstance(node, list):
                deeper += node
            elif isinstance(node, str):
                size += len(node)
            else:
                size += 1 + (node.bit_length() // 3 if isinstance(node, int) else 0)
        level = deeper
        if depth > _MAX_LEVELS or size > _MAX_CHARS:
            raise FieldError(
                param,
                f"'{param}' may have at most {_MAX_LEVELS} levels and {_MAX_CHARS} characters.",
            )
