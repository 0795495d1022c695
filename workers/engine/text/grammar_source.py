"""Constraints as llguidance reads them, and the vocabulary that it compiles them for.

Without MLX and transformers, because the process that tries a constraint imports it too.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from paceline.request.constraint import Constraint, ConstraintKind, text_argument
from workers.engine.text.lark_text import UnsupportedGrammar, before_tag, in_json, spelled
from workers.engine.text.schema_rewrite import (
    ANNOTATIONS,
    REFERENCES_LIMIT,
    as_held,
    hold_texts,
    kind_of,
    loosened,
    resolve,
    ways,
)

RECORDS, FUNCTION_TAGS = "records", "function_tags"
"""Styles of calls that a grammar can hold to their schemas: JSON with name and arguments, and
elements `function=NAME` with elements `parameter=KEY` in them."""

LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000, step_max_items=2500)
"""A mask of a usual grammar needs fewer than 2,000 items; 50,000, the default, take a second."""
CALL_KINDS = (ConstraintKind.CALLS, ConstraintKind.STRICT_TOOLS)

# One line, as Python writes JSON: models get lost in white space, and a separator that the grammar
# forces is a draft that the target accepts. No constraint is left out silently.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}

# A key that is spelled \u0061 would pass for another one than "a", whose schema it must have.
_ESCAPES = 'nrbtf\\"'
_CONTROL = re.compile(r"\\u00[017]|\\x[017{]|\\[acv0]|\x7f")
"""Characters that only such an escape can write, in texts and patterns; few schemas have one."""
_SHORTHANDS = {
    "/": r"\/",
    "\n": r"\n",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
"""Parts of a pattern and their meaning in Lark; JSON Schema's classes have only ASCII."""
_UNHELD_OF_OBJECTS = (
    "$ref $dynamicRef allOf anyOf oneOf not if enum const patternProperties propertyNames "
    "minProperties maxProperties dependentRequired dependentSchemas dependencies "
    "unevaluatedProperties".split()
)
_HELD = frozenset("enum const minLength maxLength pattern format".split())
_UNHELD_OF_TEXTS = _HELD | set("$dynamicRef allOf anyOf oneOf not if".split())
_ANY_TEXT, _NULL = "/(?s:.*)/", '"null"'
_VALUE_END = ("</parameter>", r"\n<\/parameter>\n")
"""The tag behind the text of an argument, and an expression of all that stands there."""


class Vocabulary(NamedTuple):
    """The facts of a model's tokenizer that llguidance needs; all of them fit JSON."""

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
        tokenizer: Any = self.fast or TokenizerWrapper(_Tokens(self, encode))
        return LLTokenizer(tokenizer, n_vocab=self.size, eos_token=list(self.ends))


class _Tokens:
    """The attributes that `TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.eos_token_id = vocabulary.ends[0]
        self.special_token_ids = vocabulary.special
        self.tokens = [token.encode("latin-1") for token in vocabulary.tokens]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def matcher_of(source: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the beginning of an answer."""
    return LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)


def text_source(constraint: Constraint, function: str) -> str:
    """Return llguidance's form of only the text of a function that has a grammar.

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
        case ConstraintKind.JSON:
            form = _lark_json(value)
            calls = f"form | call+\nform: {form}\n{call_rule}"
            lark = f"start: {calls if call_rule else form}"
        case ConstraintKind.CHOICE:
            lark = "start: " + " | ".join(map(json.dumps, value))
        case ConstraintKind.GRAMMAR:
            lark = any_to_lark(value)
        case ConstraintKind.CALLS:
            lark = _lark_calls(tokenizer, **value)
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
    held = as_held(schema)
    if held is False:
        raise ValueError("unsatisfiable")
    options = {} if held is True else held
    has_controls = _CONTROL.search(json.dumps(options, ensure_ascii=False)) is not None
    escapes = {} if has_controls else {"json_allowed_escapes": _ESCAPES}
    return "%json " + json.dumps({**options, "x-guidance": _JSON_OPTIONS | escapes})


def _lark_calls(
    tokenizer: LLTokenizer,
    *,
    limit: int,
    functions: Mapping[str, Any],
    grammars: Mapping[str, Mapping[str, str]],
    strict: Collection[str],
) -> str:
    """Return the grammar of a list of calls; every function's schema refers only to itself.

    A function that is not strict has a looser schema if its own cannot be held: OpenAI holds none.
    """
    calls, rules = [], []
    for index, (name, parameters) in enumerate(functions.items()):
        schema = {"type": "object", **(parameters or {"additionalProperties": False})}
        if name not in strict and name not in grammars and not _is_held(schema, tokenizer):
            schema = loosened(schema)
        call, rule = _lark_record(index, name, schema, grammars.get(name))
        calls.append(call)
        rules.append(rule)
    more = f'(", " call){{0,{limit - 1}}}' if limit > 1 else ""
    return "\n".join([f'start: "[" call {more} "]"', f"call: {' | '.join(calls)}", *rules])


def _is_held(schema: Any, tokenizer: LLTokenizer) -> bool:
    try:
        source = LLMatcher.grammar_from_lark(f"start: {_lark_json(schema)}")
    except (UnsupportedGrammar, ValueError):
        return False
    return not LLMatcher.validate_grammar(source, tokenizer, limits=LIMITS)


def _lark_record(
    index: int, name: str, schema: Mapping[str, Any], grammar: Mapping[str, str] | None
) -> tuple[str, str]:
    """Return Lark's expression of a call as JSON, and the rule of its arguments."""
    begin = f'{{"name": {json.dumps(name)}, "arguments": '
    if grammar is None:
        arguments = _lark_json(schema)
    else:
        head = json.dumps({text_argument(schema): ""})[:-2]
        text = in_json(_definition(**grammar))
        arguments = f'{json.dumps(head)} %lark {{\n{text}}} "\\"}}"'
    return f'{json.dumps(begin)} arguments_{index} "}}"', f"arguments_{index}: {arguments}"


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
            body, rule = _lark_record(index, name, schema, grammars.get(name))
            bodies.append(body)
            rules.append(rule)
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

    Raise `UnsupportedGrammar` for a keyword that cannot be held there.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    unheld = [name for name in _UNHELD_OF_OBJECTS if name in schema]
    unheld += ["required"] if set(required).difference(properties) else []
    more = schema.get("additionalProperties", True)
    if unheld or not (properties or isinstance(more, bool)):
        raise _unheld(unheld[0] if unheld else "additionalProperties")
    if not properties and more:
        # Also of a tool that is not strict: whatever elements the model writes.
        return [f'{rule}: ("<parameter=" /[^<>\\n]+/ ">\\n" {rule}_value)*',
                f"{rule}_value[lazy]: /(?s:.*){_VALUE_END[1]}/"]  # fmt: skip
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts, rules = [], []
    for index, (name, value) in enumerate(properties.items()):
        part = f"{rule}_{index}"
        parts.append(part if name in required else f"{part}?")
        head, tail = json.dumps(f"<parameter={name}>\n"), _VALUE_END[1]
        texts = _texts(value, schema)
        if texts is None:
            whole = {**definitions, **value} if isinstance(value, Mapping) else value
            rules += [f"{part}: {head} {part}_value /{tail}/", f"{part}_value: {_lark_json(whole)}"]
            continue
        if not texts:
            raise UnsupportedGrammar("No answer can satisfy the constraint.")
        text = _ANY_TEXT
        if text not in texts:
            # A model that would end the text too early must not write its tag as a part of it.
            untagged = rf"/(?s:.*)/ & ~/(?s:.*)(?:\n<\/|{spelled(_VALUE_END[0])})(?s:.*)/"
            text = f"(({' | '.join(texts)}) & {untagged})"
        rules += [f"{part}: {head} {part}_value", f"{part}_value[lazy]: {text} /{tail}/"]
    return [f"{rule}: {' '.join(parts)}" if parts else f'{rule}: ""', *rules]


def _texts(schema: Any, root: Mapping[str, Any], references: int = 0) -> list[str] | None:
    """Return Lark's terminals of the texts that a schema takes; None if it takes other values.

    Between tags a text has no quotes, and null is a text too. Raise `UnsupportedGrammar`.
    """
    if not isinstance(schema, Mapping) or references > REFERENCES_LIMIT:
        return None
    if "$ref" in schema:
        more = {name: part for name, part in schema.items() if name != "$ref"}
        target = resolve(schema["$ref"], root)
        if not isinstance(target, Mapping):
            return None  # which the compiler refuses
        texts = _texts({**target, **more}, root, references + 1)
        if texts is not None and not _UNHELD_OF_TEXTS.isdisjoint(more):
            raise _unheld("$ref")
        return texts
    choices = schema.get("anyOf", schema.get("oneOf"))
    if "type" not in schema and isinstance(choices, list):
        each = [_texts(one, root, references + 1) for one in choices]
        if None in each:
            return None
        exclusive = sum(texts != [_NULL] for texts in each) < 2  # else a text may fit two
        _check_held(schema, {"oneOf"} if exclusive and "anyOf" not in schema else {"anyOf"})
        return [text for texts in each for text in texts or ()]
    return _typed_texts(schema)


def _typed_texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the terminals of a schema that names its types, or lists its values."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    named = schema.get("type", [*map(kind_of, listed)] if isinstance(listed, list) else ())
    kinds = {named} if isinstance(named, str) else set(named)
    if not kinds or not kinds <= {"string", "null"}:
        return None
    _check_held(schema, _HELD - ({"const"} if "enum" in schema else set()) | {"allOf"})
    null = [_NULL] if "null" in kinds and (listed is None or None in listed) else []
    strings = None if listed is None else [spelled(one) for one in listed if isinstance(one, str)]
    if "string" not in kinds or strings == []:
        return null
    terminals = [] if strings is None else [f"/(?:{'|'.join(strings)})/"]
    for part in _parts_of_text(schema):
        low, high = part.get("minLength", 0), part.get("maxLength")
        for name, length in (("minLength", low), ("maxLength", high)):
            if name in part and (type(length) is not int or length < 0):
                raise UnsupportedGrammar(f"The value of '{name}' is invalid.")
        if high is not None and low > high:
            raise UnsupportedGrammar("No answer can satisfy the constraint.")
        if low or high is not None:
            terminals.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
        if "pattern" in part:
            terminals.append(_searched(part["pattern"]))
        if "format" in part:
            raise _unheld("format")
    return ["(" + " & ".join(terminals) + ")" if terminals else _ANY_TEXT, *null]


def _parts_of_text(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema of a string and the schemas of its `allOf`; all of them apply."""
    held = hold_texts(schema)
    yield held
    for part in held.get("allOf", ()):
        bounds = {"minLength", "maxLength", "pattern", "format", "allOf", "type"}
        if not isinstance(part, Mapping) or not {*part} <= ANNOTATIONS | bounds:
            raise _unheld("allOf")
        if part.get("type", "string") != "string":
            raise _unheld("type")
        yield from _parts_of_text(part)


def _searched(pattern: Any) -> str:
    """Return the terminal of the texts in which a pattern of JSON Schema is found."""
    if not isinstance(pattern, str):
        raise UnsupportedGrammar("The value of 'pattern' is invalid.")
    expressions = []
    for way in ways(pattern):
        atoms = [_SHORTHANDS.get(piece, piece) for piece in re.findall(r"(?s)\\.|.", way)]
        head = "" if atoms[:1] == ["^"] else "(?s:.*)"
        tail = "" if atoms[-1:] == ["$"] else "(?s:.*)"
        inner = "".join(atoms[not head : len(atoms) - (not tail)])
        expressions.append(f"{head}(?:{inner}){tail}")
    return f"/{'|'.join(expressions)}/"


def _check_held(schema: Mapping[str, Any], held: Collection[str]) -> None:
    """Raise `UnsupportedGrammar` for a keyword of JSON Schema that a text is not held to."""
    for name in _UNHELD_OF_TEXTS:
        if name in schema and name not in held:
            raise _unheld(name)


def _unheld(keyword: str) -> UnsupportedGrammar:
    return UnsupportedGrammar(f"The worker does not support the keyword '{keyword}' in this place.")


def _definition(syntax: str, definition: str) -> str:
    if syntax == "lark":
        return definition
    # An expression matches whole texts, so it needs no anchors around it.
    whole = re.sub(r"^\^|(?<!\\)((?:\\\\)*)\$$", r"\1", definition)
    quoted = re.sub(r"(?s)\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], whole)
    return f"start: /{quoted}/"
