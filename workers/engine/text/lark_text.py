"""Lark grammars of a text that stands within another one: in a string of JSON, or between tags.

llguidance nests a grammar as it is. So each terminal becomes one of the text's spelling: in JSON,
quotes, backslashes and control characters are escaped, each in one way, so that an expression is
spelled piece by piece. llguidance's lexer ends a terminal one byte behind it and never goes back,
but an escape has two bytes or six. So the rules become terminals too, unless one contains itself:
then one terminal matches all of the text, and nothing but a quote or a tag ends it.
"""

import json
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import regex

_NAME = r"_?(?:[a-z][a-z0-9_]*|[A-Z][A-Z0-9_]*)"
_STRING = r'"(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|[^"\\\x00-\x1f\x7f])*"'
_COMMON = r"""
    %import[ \t]+common[ \t]*(?:
        \.[ \t]*(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<own>\w+))?
      | \([ \t]*(?P<many>\w+(?:[ \t]*,[ \t]*\w+)*)[ \t]*\))
"""
_IMPORT: Final = regex.compile(_COMMON, regex.VERBOSE)
_TOKENS: Final = regex.compile(
    rf"""
      (?P<skipped>[ \t\r]+|(?:\#|//)[^\n]*)
    | (?P<range>(?P<low>{_STRING})[ \t]*\.\.[ \t]*(?P<high>{_STRING}))
    | (?P<string>{_STRING})(?P<case>i?)
    | /(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[a-z]*)
    | (?P<import>{_COMMON})
    | (?P<alias>->[ \t]*\w+)
    | (?P<name>[!?]?{_NAME})
    | (?P<plain>%ignore\b|~(?=[ \t]*[0-9])|[0-9]+|[][(){{}}:|&*+?.,\n])
    """,
    regex.VERBOSE,
)
_CLASS_RUN: Final = regex.compile(r"(\[(?:\\.|[^][\\])*\]|\\s)[+*]?")
_STRINGS_OF_COMMON: Final = {
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of Lark's library that match a character which JSON escapes, or anything at all."""

_CODE = r"x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|[uU]\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
_PIECES: Final = regex.compile(
    rf"""
      (?P<open>\((?:\?(?:P?<\w+>|(?P<flags>[a-zA-Z-]*)(?P<scope>[:)])))?)
    | (?P<close>\))
    | (?P<other>[*+?|^$]|\{{[0-9]+(?:,[0-9]*)?\}}|\\[bBAzZ])
    | (?P<atom>
          \.|\\(?:{_CODE}|[pP]\{{[^}}]*\}}|[pP].|.)
        | (?P<class>\[\^?\]?(?:\\.|[^][\\]|(?&class))*+\])|.)
    """,
    regex.VERBOSE | regex.DOTALL,
)
_ESCAPES: Final = regex.compile(rf"\\(?:(?P<code>{_CODE})|.)", regex.DOTALL)
_SPACES = r"\t\n\x0b\x0c\r\x20\x85\p{White_Space}"
_SHORT: Final = {'"': '"', "\\": "\\\\", "\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r"}
"""Characters that may follow the backslash in a class of an expression."""
_ESCAPED: Final = (*_SHORT, *(chr(code) for code in range(0x20) if chr(code) not in _SHORT))
_UNESCAPED = r"[^\x22\x5c\x00-\x1f]"
"""A character that JSON writes as it is."""
_MALFORMED = "A regular expression in this grammar is malformed."


class UnsupportedGrammar(ValueError):
    """A grammar that cannot stand within a text; the message is for the client."""


class _Token(NamedTuple):
    kind: str
    """One of `literal`, `regex`, `name`, `import` and `other`."""
    text: str
    flags: str = ""
    line: int = 0


class _Grammar(NamedTuple):
    """A grammar of Lark: its definitions by name, its ignored texts, and its imports."""

    definitions: dict[str, list[_Token]]
    ignored: list[list[_Token]]
    imports: dict[str, str]

    @property
    def is_regular(self) -> bool:
        """Return whether no rule contains itself, so that one expression matches all of it."""
        known = {*self.definitions, *self.imports}
        pending = {
            name: known & {token.text for token in body if token.kind == "name"}
            for name, body in self.definitions.items()
        }
        done = set(self.imports)
        while ready := [name for name, names in pending.items() if names <= done]:
            done.update(ready)
            for name in ready:
                del pending[name]
        return not pending


def in_json(definition: str) -> str:
    """Return the grammar of the texts of another one as `json.dumps` writes them, unquoted.

    It takes exactly those if no rule contains itself. Otherwise it may not take a text in which
    one terminal could go on with an escape, and the next one begins with another.
    """
    grammar = _parse(definition)
    if grammar.is_regular:
        return _as_terminals(grammar, regex_in_json) + f"start: {_rule_name('start')}\n"
    return _as_rules(
        grammar, regex_in_json, [_ignored_in_json(one, grammar) for one in grammar.ignored]
    )


def before_tag(definition: str, tag: str, tail: str) -> str:
    """Return the grammar of a text and the tail behind it, an expression that has the tag in it.

    No text contains the tag, unless a rule contains itself. Then a terminal that matches the tail
    must not be the last one.
    """
    grammar = _parse(definition)
    if not grammar.is_regular:
        text = _as_rules(grammar, _same, [_written(body, _same) for body in grammar.ignored])
        return f"start: %lark {{\n{text}}} /{tail}/\n"
    untagged = f"/(?s:.*)/ & ~/(?s:.*){spelled(tag)}(?s:.*)/"
    text = f"({_rule_name('start')} & {untagged})"
    # A greedy terminal might take the line feed of the tail.
    return _as_terminals(grammar, _same) + f"start[lazy]: {text} /{tail}/\n"


def _parse(definition: str) -> _Grammar:
    grammar = _Grammar({}, [], {})
    for head, *rest in _statements(definition):
        if head.kind == "import" and not rest:
            _import(head.text, grammar)
        elif head.text == "%ignore":
            grammar.ignored.append(rest)
        elif head.kind == "name" and rest and rest[0].text == ":":
            name = head.text.lstrip("!?")
            if name in grammar.definitions:
                raise UnsupportedGrammar(f"This grammar defines '{name[:100]}' twice.")
            grammar.definitions[name] = rest[1:]
        else:
            raise _unsupported(head.line)
    if "start" not in grammar.definitions:
        raise UnsupportedGrammar("This grammar has no rule 'start'.")
    return grammar


def _statements(definition: str) -> Iterator[list[_Token]]:
    """Yield the tokens of each statement; a line that begins with a bar continues the last one."""
    statement: list[_Token] = []
    ended = False
    for token in _tokens(definition):
        if token.kind == "other" and token.text == "\n":
            ended = True
            continue
        if ended and statement and token.text != "|":
            yield statement
            statement = []
        statement.append(token)
        ended = False
    if statement:
        yield statement


def _tokens(definition: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(definition):
        found = _TOKENS.match(definition, at)
        if found is None:
            raise _unsupported(line)
        at = found.end()
        if found["range"]:
            low, high = _text_of(found["low"]), _text_of(found["high"])
            if len(low) != 1 or len(high) != 1 or low > high:
                raise UnsupportedGrammar("A range of characters in this grammar is malformed.")
            yield _Token("regex", f"[{spelled(low)}-{spelled(high)}]", line=line)
        elif found["string"]:
            yield _Token("literal", _text_of(found["string"]), found["case"], line)
        elif found["regex"]:
            yield _Token("regex", found["regex"], found["flags"], line)
        elif not (found["skipped"] or found["alias"]):  # a branch of a tree that nobody builds
            kind = "import" if found["import"] else "name" if found["name"] else "other"
            yield _Token(kind, found[0], line=line)
        line += found[0].count("\n")


def _import(statement: str, grammar: _Grammar) -> None:
    found = _IMPORT.fullmatch(statement)
    assert found is not None, "the tokens are made with this expression"
    for name in [found["one"]] if found["one"] else regex.findall(r"\w+", found["many"]):
        own = found["own"] or name
        if name in _STRINGS_OF_COMMON:
            grammar.definitions[own] = [_Token("regex", _STRINGS_OF_COMMON[name])]
        else:
            grammar.imports[own] = name


def _ignored_in_json(body: list[_Token], grammar: _Grammar) -> str:
    """Return the pattern of ignored text; behind a run of it, a text may begin with an escape."""
    named = body
    while len(named) == 1 and named[0].text in grammar.definitions:
        named = grammar.definitions[named[0].text]
    run = _CLASS_RUN.fullmatch(named[0].text) if len(named) == 1 else None
    if run and named[0].kind == "regex" and not named[0].flags:
        return f"/[{run[1]}&&{_UNESCAPED}]+|{regex_in_json(run[1])}/"
    return _written(body, regex_in_json)


def _as_rules(grammar: _Grammar, spell: Callable[[str, str], str], ignored: list[str]) -> str:
    lines = [f"%import common.{name} -> {own}" for own, name in grammar.imports.items()]
    lines += [f"{name}: {_written(body, spell)}" for name, body in grammar.definitions.items()]
    return "\n".join([*lines, *(f"%ignore {one}" for one in ignored), ""])


def _as_terminals(grammar: _Grammar, spell: Callable[[str, str], str]) -> str:
    """Return a grammar whose rules are terminals, so that the lexer matches any of them whole."""
    lines = [f"%import common.{name} -> {own}" for own, name in grammar.imports.items()]
    ignored = ""
    if grammar.ignored:
        ways = [f"({_written(body, spell)})" for body in grammar.ignored]
        ignored = _rule_name("_ignored")
        lines.append(f"{ignored}: ({' | '.join(ways)})*")
    for name, body in grammar.definitions.items():
        if name.isupper():
            lines.append(f"{name}: {_written(body, spell)}")
        else:
            lines.append(f"{_rule_name(name)}: {_written(body, spell, ignored, rename=True)}")
    return "\n".join([*lines, ""])


def _written(
    body: list[_Token],
    spell: Callable[[str, str], str],
    ignored: str = "",
    *,
    rename: bool = False,
) -> str:
    """Return a body with its texts and expressions in another spelling.

    `ignored` may follow each terminal.
    """
    parts = []
    for token in body:
        text, terminal = token.text, token.kind in ("literal", "regex")
        if token.kind == "literal":
            source, flags = spelled(text), token.flags
            text = f"/{spell(source, flags)}/{flags}" if text or flags else '""'
        elif token.kind == "regex":
            text = f"/{spell(text, token.flags)}/{token.flags}"
        elif token.kind == "name":
            terminal = text.isupper()
            text = text if terminal or not rename else _rule_name(text)
        parts.append(f"({text} {ignored})" if terminal and ignored else text)
    return " ".join(parts).replace("\n", "")


def _rule_name(rule: str) -> str:
    """Return the terminal that stands for a rule; the names of terminals have no such dash."""
    return f"RULE-{rule.upper()}"


def _same(source: str, _flags: str) -> str:
    return source


def _unsupported(line: int) -> UnsupportedGrammar:
    return UnsupportedGrammar(f"The worker does not support line {line} of this grammar.")


def regex_in_json(source: str, flags: str = "") -> str:
    """Return an expression of the texts of another one as `json.dumps` writes them, unquoted.

    Each character has one spelling there, so an expression is that of its pieces.
    """
    pieces: list[str] = []
    dot_all = [_dot_all(flags, on=False)]
    at = 0
    while at < len(source):
        found = _PIECES.match(source, at)
        if found is None:
            raise UnsupportedGrammar(_MALFORMED)
        at = found.end()
        if found["open"]:
            inner = _dot_all(found["flags"] or "", on=dot_all[-1])
            if found["scope"] == ")":  # for the rest of the group
                dot_all[-1] = inner
            else:
                dot_all.append(inner)
        elif found["close"]:
            dot_all.pop()
            if not dot_all:
                raise UnsupportedGrammar(_MALFORMED)
        pieces.append(_atom_in_json(found[0], dot_all[-1]) if found["atom"] else found[0])
    return "".join(pieces)


def _text_of(string: str) -> str:
    return str(json.loads(regex.sub(r"\\(?:x([0-9a-fA-F]{2})|.)", _json_escape, string)))


def _json_escape(escape: regex.Match[str]) -> str:
    return rf"\u00{escape[1]}" if escape[1] else str(escape[0])


def spelled(text: str) -> str:
    """Return an expression of a text, also within a class."""
    return "".join(rf"\x{{{ord(char):x}}}" for char in text)


def _dot_all(flags: str, *, on: bool) -> bool:
    """Return whether a dot matches a line feed after these flags."""
    added, _, removed = flags.partition("-")
    if set(added) - set("imsuU") or set(removed) - set("imsU"):
        raise UnsupportedGrammar("The worker does not support a flag of a regular expression.")
    return "s" not in removed and (on or "s" in added)


def _atom_in_json(atom: str, dot_all: bool) -> str:
    """Return the atom that matches the JSON spelling of each character that `atom` matches."""
    read = _ESCAPES.sub(_readable, atom)
    try:
        pattern = regex.compile(read, regex.V1 | (regex.DOTALL if dot_all else 0))
    except regex.error:
        raise UnsupportedGrammar(_MALFORMED) from None
    escaped = [char for char in _ESCAPED if pattern.fullmatch(char)]
    if not escaped:
        return atom
    short = "".join(_SHORT[char] for char in escaped if char in _SHORT)
    codes = [f"{ord(char):02x}" for char in escaped if char not in _SHORT]
    ways = [f"[{short}]"] if short else []
    if codes:
        ways.append(f"u00(?:{'|'.join(codes)})")
    escapes = rf"(?-i:\\(?:{'|'.join(ways)}))"
    if atom == ".":
        return f"(?:{_UNESCAPED}|{escapes})"
    if atom[0] == "[" or (len(atom) == 2 and atom[1] in "sSdDwW") or atom[1:2] in ("p", "P"):
        return f"(?:[{atom}&&{_UNESCAPED}]|{escapes})"
    return escapes


def _readable(escape: regex.Match[str]) -> str:
    r"""Return an escape as Python's `regex` reads it; it knows no `\x{...}`, and more spaces."""
    if escape["code"]:
        return str(regex.escape(chr(int(escape["code"].strip("xuU{}"), 16))))
    return {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}.get(escape[0], escape[0])
