"""Constraints as llguidance reads them, and the vocabulary that it compiles them for.

Without MLX and transformers, because the process that tries a constraint imports it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from policies.request.constraint import Constraint, ConstraintKind, text_argument
from workers.engine.lark_text import before_tag, in_json, spelled

RECORDS, FUNCTION_TAGS = "records", "function_tags"
"""Styles of calls that a grammar can hold to their schemas: JSON with name and arguments, and
elements `function=NAME` with elements `parameter=KEY` in them."""

LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)

# One line, as Python writes JSON: models get lost in white space, and a separator that the grammar
# forces is a draft that the target accepts. No constraint is left out silently.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}

# llguidance allows a leap second in every minute, and fractions without end.
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_VALUES = frozenset({"const", "enum", "default", "examples"})
_VALUE_END = ("</parameter>", r"\n<\/parameter>\n")
"""The tag behind the text of an argument, and an expression of all that stands there."""


class Vocabulary(NamedTuple):
    """What llguidance needs of a model's tokenizer; all of it can be written as JSON."""

    size: int
    """Number of the model's scores."""
    ends: Sequence[int]
    """Tokens that end an answer."""
    fast: str = ""
    """The JSON of a tokenizer of the `tokenizers` package; empty for another one."""
    tokens: Sequence[str] = ()
    """The bytes of each token as Latin-1, for another tokenizer."""
    special: Sequence[int] = ()

    def load(self, encode: Callable[[str], list[int]] = lambda _: []) -> LLTokenizer:
        """Load it; `encode` tokenizes forced texts for a tokenizer that is not fast."""
        if self.fast:
            return LLTokenizer(self.fast, n_vocab=self.size, eos_token=list(self.ends))
        wrapped = TokenizerWrapper(_Tokens(self, encode))
        return LLTokenizer(wrapped, n_vocab=self.size, eos_token=list(self.ends))


@dataclass
class _Tokens:
    """The attributes that `TokenizerWrapper` reads."""

    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        self.eos_token_id = self.vocabulary.ends[0]
        self.special_token_ids = self.vocabulary.special
        self.tokens = [token.encode("latin-1") for token in self.vocabulary.tokens]

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def text_source(constraint: Constraint, function: str) -> str:
    """Return llguidance's form of the text of a function that has a grammar, alone.

    Raise `UnsupportedGrammar`.
    """
    definition = _definition(**constraint.value["grammars"][function])
    if constraint.value.get("style") == FUNCTION_TAGS:
        return LLMatcher.grammar_from_lark(before_tag(definition, *_VALUE_END))
    return LLMatcher.grammar_from_lark(in_json(definition))


def grammar_source(
    constraint: Constraint, tokenizer: LLTokenizer, call_marks: Sequence[str] | None
) -> str:
    """Return llguidance's form of a constraint; raise any exception if it has none.

    With `call_marks`, the answer may also call tools between them.
    """
    value = constraint.value
    call_rule = _call_rule(tokenizer, *call_marks) if call_marks else None
    match constraint.kind:
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(value)
        case ConstraintKind.JSON if call_rule:
            lark = f"start: form | call+\nform: {_lark_json(value)}\n{call_rule}"
        case ConstraintKind.JSON:
            lark = f"start: {_lark_json(value)}"
        case ConstraintKind.CHOICE:
            lark = "start: " + " | ".join(map(json.dumps, value))
        case ConstraintKind.GRAMMAR:
            lark = any_to_lark(value)
        case ConstraintKind.CALLS:
            lark = _lark_calls(**value)
        case ConstraintKind.STRICT_TOOLS:
            assert call_marks is not None, "the model has a format of calls"
            lark = _lark_strict_tools(tokenizer, *call_marks, **value)
    return LLMatcher.grammar_from_lark(lark)


def _call_rule(tokenizer: LLTokenizer, begin: str, end: str) -> str | None:
    """Return the rule of a call in the model's own format, if texts begin and end one."""
    if not begin or not end:
        return None
    first, last = _mark(tokenizer, begin), _mark(tokenizer, end)
    if last.startswith("<["):
        return f"call: {first} /(?s:.*)/ {last} /\\n*/"
    return f"call: {first} call_body /\\n*/\ncall_body[lazy]: /(?s:.*){spelled(end)}/"


def _mark(tokenizer: LLTokenizer, text: str) -> str:
    """Return Lark's expression of a text, which may be a special token."""
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    if len(tokens) == 1 and tokenizer.is_special_token(tokens[0]):
        return f"<[{tokens[0]}]>"
    return json.dumps(text)


def _lark_json(schema: Any) -> str:
    """Return Lark's expression of a JSON Schema."""
    if schema is False:
        raise ValueError("unsatisfiable")
    options = {} if schema is True else _with_patterns(schema)
    return "%json " + json.dumps({**options, "x-guidance": _JSON_OPTIONS})


def _with_patterns(schema: Any) -> Any:
    """Return a schema with patterns for the formats of dates and times."""
    if isinstance(schema, list):
        return [_with_patterns(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {
        name: part if name in _VALUES else _with_patterns(part) for name, part in schema.items()
    }
    form, more = parts.get("format"), parts.get("allOf", [])
    if isinstance(form, str) and form in _PATTERNS and isinstance(more, list):
        del parts["format"]
        parts["allOf"] = [*more, {"pattern": _PATTERNS[form]}]
    return parts


def _lark_calls(
    limit: int, functions: Mapping[str, Any], grammars: Mapping[str, Mapping[str, str]]
) -> str:
    """Return the grammar of a list of calls; every function's schema refers to itself alone."""
    calls, rules = [], []
    for index, (name, parameters) in enumerate(functions.items()):
        begin = f'{{"name": {json.dumps(name)}, "arguments": '
        calls.append(f'{json.dumps(begin)} arguments_{index} "}}"')
        schema = {"type": "object", **(parameters or {"additionalProperties": False})}
        arguments = _lark_arguments(schema, grammars.get(name))
        rules.append(f"arguments_{index}: {arguments}")
    more = f'(", " call){{0,{limit - 1}}}' if limit > 1 else ""
    start = f'start: "[" call {more} "]"'
    return "\n".join([start, f"call: {' | '.join(calls)}", *rules])


def _lark_arguments(schema: Any, grammar: Mapping[str, str] | None) -> str:
    """Return Lark's expression of the arguments of one function as JSON."""
    if grammar is None:
        return _lark_json(schema)
    head = json.dumps({text_argument(schema): ""})[:-2]
    return f'{json.dumps(head)} %lark {{\n{in_json(_definition(**grammar))}}} "\\"}}"'


def _lark_strict_tools(
    tokenizer: LLTokenizer,
    begin: str,
    end: str,
    *,
    limit: int,
    functions: Mapping[str, Any],
    grammars: Mapping[str, Mapping[str, str]],
    style: str,
) -> str:
    """Return the grammar of free text and calls in the model's own format."""
    first, last = _mark(tokenizer, begin), _mark(tokenizer, end) if end else ""
    call = f"/\\n?/ body /\\n?/ {last} /\\n*/"
    more = f"({first} {call}){{0,{limit - 1}}}" if limit > 1 else ""
    if first.startswith("<["):  # no text contains a special token
        rules = [f"start: text | text {first} {call} {more}", "text: /(?s:.*)/"]
    else:
        mark = spelled(begin)
        rules = [
            f"start: TEXT | before {call} {more}",
            f"before[lazy]: /(?s:.*){mark}/",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/",
        ]
    bodies = []
    for index, (name, parameters) in enumerate(functions.items()):
        schema = {"type": "object", **parameters}
        if style == RECORDS:
            head = f'{{"name": {json.dumps(name)}, "arguments": '
            bodies.append(f'{json.dumps(head)} arguments_{index} "}}"')
            arguments = _lark_arguments(schema, grammars.get(name))
            rules.append(f"arguments_{index}: {arguments}")
        else:
            head = json.dumps(f"<function={name}>\n")
            bodies.append(f'{head} arguments_{index} "</function>"')
            if name in grammars:
                begin = json.dumps(f"<parameter={text_argument(schema)}>\n")
                text = before_tag(_definition(**grammars[name]), *_VALUE_END)
                rules.append(f"arguments_{index}: {begin} %lark {{\n{text}}}")
            else:
                rules += _lark_tags(f"arguments_{index}", schema)
    record = " | ".join(bodies)
    if style != RECORDS:
        return "\n".join([*rules, f"body: {record}"])
    return "\n".join([*rules, 'body: record | "[" record (", " record)* "]"', f"record: {record}"])


def _lark_tags(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the rules of arguments in elements `parameter=KEY`, in the order of the properties.

    A text has no quotes there: its length holds, its pattern and its format do not.
    """
    properties = schema.get("properties") or {}
    if not properties and schema.get("additionalProperties", True) is not False:
        # Of a tool that is not strict: whatever elements the model writes.
        return [f'{rule}: ("<parameter=" /[^<>\\n]+/ ">\\n" {rule}_value)*',
                f"{rule}_value[lazy]: /(?s:.*)\\n<\\/parameter>\\n/"]  # fmt: skip
    required = schema.get("required") or ()
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts, rules = [], []
    for index, (name, value) in enumerate(properties.items()):
        part = f"{rule}_{index}"
        parts.append(part if name in required else f"{part}?")
        head, tail = json.dumps(f"<parameter={name}>\n"), r"\n<\/parameter>\n"
        texts = _texts(value)
        if texts is None:
            whole = {**definitions, **value} if isinstance(value, Mapping) else value
            rules += [f"{part}: {head} {part}_value /{tail}/", f"{part}_value: {_lark_json(whole)}"]
        elif texts:
            choice = " | ".join(json.dumps(text) for text in texts)
            rules.append(f"{part}: {head} ({choice}) /{tail}/")
        elif "maxLength" in value:
            bounds = f"{{{int(value.get('minLength', 0))},{int(value['maxLength'])}}}"
            rules.append(f"{part}: {head} /[^<\\n]{bounds}{tail}/")
        else:
            rules += [f"{part}: {head} {part}_value", f"{part}_value[lazy]: /(?s:.*){tail}/"]
    return [f"{rule}: {' '.join(parts)}" if parts else f'{rule}: ""', *rules]


def _definition(syntax: str, definition: str) -> str:
    """Return the grammar of a function's text in Lark."""
    if syntax == "lark":
        return definition
    # An expression matches whole texts, so it needs no anchors around it.
    whole = re.sub(r"^\^|(?<!\\)((?:\\\\)*)\$$", r"\1", definition)
    quoted = re.sub(r"(?s)\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], whole)
    return f"start: /{quoted}/"


def _texts(schema: Any) -> Sequence[str] | None:
    """Return the texts that a schema lists; none if it takes any text, None if no text alone."""
    if not isinstance(schema, Mapping):
        return None
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if listed:
        return listed if all(isinstance(one, str) for one in listed) else None
    return [] if schema.get("type") == "string" else None
