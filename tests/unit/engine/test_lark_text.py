"""Grammars of a text in JSON and between tags: they take a sentence's spelling, and no other."""

import json
from collections.abc import Iterable
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.support.patch_grammar import PATCH
from workers.engine.text import grammar_source
from workers.engine.text.lark_text import UnsupportedGrammar, before_tag, in_json, regex_in_json

TAG = "</parameter>"
TAIL = r"\n<\/parameter>\n"
STATEMENTS = r"""
start: (assignment | _blank)+   // a comment with a "quote
assignment: NAME "=" sum _blank
?sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER -> number
    | STRING
    | "\\" HEX{2,3}
    | [ "NOT"i ] NAME
NAME: "a".."c"+ # another
HEX: " ".."~" & /[0-9a-f"\\]/
STRING: ESCAPED_STRING
_blank: NEWLINE
%import common.NUMBER
%import common (ESCAPED_STRING, NEWLINE)
%ignore /[ \t]/
"""
RECURSIVE = r"""
start: (value END)+
value: STRING | NAME | "[" [value ("," value)*] "]" | "{" value "}"
STRING: "\"" /[^"\n]*/ "\""
NAME: /[a-z]+/
END: ";\n"
%import common.WS
%ignore WS
"""
# Each with sentences, of which the first is one.
GRAMMARS = {
    "patch": (
        PATCH,
        '*** Begin Patch\n*** Update File: a "b".py\n@@ def f():\n-\told\\\n+new\n*** End Patch',
        "*** Begin Patch\n*** Add File: a\n+\n+x</b>\n*** Delete File: é\n*** End Patch\n",
        "*** Begin Patch\n*** End Patch",
    ),
    "statements": (STATEMENTS, 'a = 1 + 2*"x\\"y\\n"\n\n', 'b = \\a"\n', "c=not  a\r\n", "a=1"),
    "text": (r"start: /(?s:.+)/", '\x00\x1f\x7f"\\/\n<b>', ""),
    "imports": (
        'start: (A | WS | SQL_COMMENT | "\\x41\\u00e9")+\n'
        "%import common.LF -> A\n%import common.WS\n%import common.SQL_COMMENT",
        *('\n -- "x"\nAé', "-"),
    ),
    "escapes": (
        'start: LINE+\nLINE: "a\\tB"i "\\"".."]" | /./s',
        *('A\tb"', "a\tB\\", "\n\n", "é"),
    ),
    "greedy": ('start: "x" WORD* "b"\nWORD: /[^b]*\\n/', "x\ny\nb", "xb"),
}


@lru_cache(maxsize=32)
def matcher_of(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = grammar_source.matcher_of(LLMatcher.grammar_from_lark(grammar), tokenizer)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = matcher_of(tokenizer, grammar).deep_copy()
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def in_string(grammar: str) -> str:
    return f'start: "\\"" %lark {{\n{in_json(grammar)}}} "\\""'


@pytest.mark.parametrize("name", GRAMMARS)
def test_json_takes_the_sentences_of_a_grammar(tokenizer: LLTokenizer, name: str) -> None:
    """The closing quote ends a text that nothing else would end."""
    grammar, *sentences = GRAMMARS[name]
    for text in sentences:
        taken = accepts(tokenizer, grammar, text)
        assert accepts(tokenizer, in_string(grammar), f'"{spelled(text)}"') == taken, text
    assert accepts(tokenizer, grammar, sentences[0])
    assert not accepts(tokenizer, in_string(grammar), '"\\u0041"')


def changed(data: st.DataObject, sentences: list[str]) -> str:
    """Return a sentence in which something is inserted, left out or doubled, or nothing is."""
    text = data.draw(st.sampled_from(sentences))
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    piece = data.draw(st.text('ab"\\\n\t+-= \x01é</', max_size=3))
    return text[:first] + piece + text[data.draw(st.sampled_from((first, last))) :]


@pytest.mark.parametrize("examples", [80, pytest.param(1000, marks=pytest.mark.proof)])
def test_json_takes_exactly_the_texts_of_a_grammar(tokenizer: LLTokenizer, examples: int) -> None:
    """What llguidance itself takes, and what any order of the same terminals would be."""

    @given(data=st.data(), name=st.sampled_from(sorted(GRAMMARS)))
    @settings(max_examples=examples)
    def search(data: st.DataObject, name: str) -> None:
        grammar, *sentences = GRAMMARS[name]
        text = changed(data, sentences)
        taken = accepts(tokenizer, before_tag(grammar, TAG, "!"), f"{text}!")
        assert accepts(tokenizer, in_json(grammar), spelled(text)) == taken
        assert taken or not accepts(tokenizer, grammar, text)

    search()


NESTED = ['["a", [x,{"é"}]]\n ;\n', 'ab;\n[ "\\"\n,\t"b" ];\n', "[];\n", "x"]


@given(data=st.data())
@settings(max_examples=60)
def test_json_takes_no_other_text_than_a_grammar_that_contains_itself(tokenizer, data) -> None:
    text = changed(data, NESTED)
    if accepts(tokenizer, in_json(RECURSIVE), spelled(text)):
        assert accepts(tokenizer, RECURSIVE, text)


def test_json_takes_the_sentences_of_a_grammar_that_contains_itself(tokenizer: LLTokenizer) -> None:
    for text in NESTED[:3]:
        assert accepts(tokenizer, RECURSIVE, text), text
        assert accepts(tokenizer, in_string(RECURSIVE), f'"{spelled(text)}"'), text
        tagged = before_tag(RECURSIVE, TAG, TAIL)
        assert accepts(tokenizer, tagged, f"{text}\n{TAG}\n"), text


ATOMS = [
    "a", "B", '"', r"\\", r"\n", r"\t", r"\/", "é", ".", r"\x1f", r"\x{22}",
    r"\u005c", r"\d", r"\s", r"\S", r"\w", r"\W", r"\pL", r"\PL", r"\p{Lu}", r"\.", "[a-c]",
    r"[^a]", r'["\\]', r"[\n\r\t]", r"[^\s]", r"[\x00-\x1f]", r"[ -~]", r"[\W--[b]]", r"[^\]a]",
    r"[[:alpha:]\\]", r"[.-\]]", r"[^\n]", "(?i:b)", r"(?s:.)", r"(?-s:.)", r"[\S&&[^a]]",
]  # fmt: skip


def alternatives(parts: list[str]) -> str:
    return f"(?:{'|'.join(parts)})"


REPEATS = st.sampled_from(("*", "+", "?", "{1,2}", "{2}"))
EXPRESSIONS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(alternatives),
        st.builds("({}){}".format, inner, REPEATS),
        inner.map("(?s){}".format),
        inner.map("(?P<a>(?i){})".format),
    ),
    max_leaves=5,
).map(lambda text: text.replace("(?P<a>", "(?P<b>", 1).replace("(?P<a>", "(?:"))
CHARACTERS = 'aAbBn"\\/.\n\t\r\x00\x1f\x1c\x7f\xa0\u2028é😀] '
FLAGS = ("", "s", "i", "is")


def assert_takes_the_same(
    tokenizer: LLTokenizer, expression: str, flags: str, texts: Iterable[str]
) -> None:
    quoted = regex_in_json(expression, flags)
    for text in texts:
        taken = accepts(tokenizer, f"start: /{expression}/{flags}", text)
        assert accepts(tokenizer, f"start: /{quoted}/{flags}", spelled(text)) == taken, text


@pytest.mark.parametrize("flags", ["", "is"])
@pytest.mark.parametrize("around", ["%s", "(%s)", "(?s)%s", "((?s)a?)%s"])
def test_a_piece_of_an_expression_in_json_takes_exactly_its_characters(
    tokenizer: LLTokenizer, around: str, flags: str
) -> None:
    for atom in ATOMS:
        assert_takes_the_same(tokenizer, around % atom, flags, CHARACTERS)
    quoted = regex_in_json(around % r"[\x00-\x1f]", flags)
    for spelling in ("\\N", "\\U001f", "\\u001F", "\\u000a"):
        assert not accepts(tokenizer, f"start: /{quoted}/{flags}", spelling), spelling


@pytest.mark.parametrize("examples", [150, pytest.param(3000, marks=pytest.mark.proof)])
def test_an_expression_in_json_takes_exactly_the_texts_of_the_plain_one(
    tokenizer: LLTokenizer, examples: int
) -> None:
    texts = st.lists(st.text(CHARACTERS, max_size=4), min_size=4, max_size=9)

    @given(EXPRESSIONS, st.sampled_from(FLAGS), texts)
    @settings(max_examples=examples)
    def search(expression: str, flags: str, texts: list[str]) -> None:
        assert_takes_the_same(tokenizer, expression, flags, texts)

    search()


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_tag_ends_the_text_whatever_the_grammar_could_add(tokenizer, name) -> None:
    grammar, *sentences = GRAMMARS[name]
    tagged, tail = before_tag(grammar, TAG, TAIL), f"\n{TAG}\n"
    for text in sentences:
        assert accepts(tokenizer, tagged, text + tail) == accepts(tokenizer, grammar, text), text
        assert not accepts(tokenizer, tagged, text)
        assert not accepts(tokenizer, tagged, text + tail + text + tail)


@pytest.mark.parametrize(
    "definition",
    [
        'start: "a" <|end|>',
        "start: <[1]>",
        "start: @other",
        'start: %json {"type": "string"}',
        'start: %regex {"substring_chars": "ab"}',
        'start: A & ~/b/\nA: "a"',
        '%llguidance {"no_forcing": true}\nstart: "a"',
        "%import other.WORD\nstart: WORD",
        "%declare A\nstart: A",
        "start: 'a'",
        'start: "a"\nstart: "b"',
        'begin: "a"',
        "start[lazy]: /a/",
        'start: "ab".."z"',
        "start: /[/",
        "start: /a)/",
        "start: /a b/x",
    ],
)
def test_what_no_text_can_have_is_refused(definition: str) -> None:
    with pytest.raises(UnsupportedGrammar):
        in_json(definition)
