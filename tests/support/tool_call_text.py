"""Tool calls from a client to a model's text and back, for any chat template."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from paceline.request.call_rules import CallRules
from workers.demo import CHECKPOINT
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.text.tool_formats import FORMATS, ToolFormat, detect_tool_format
from workers.engine.types import InvalidGeneration
from workers.server.tool_arguments import TagReader
from workers.server.tool_calls import ArgumentsText, ToolCallSplitter

QUESTION, RESULT = "Kwestie?", "Rezultat."
_NAMES = ("add", "get weather", "mcp:search-web")
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
_HARMONY_HEADER = re.compile(
    r"(?:<\|start\|>assistant)? (to=functions\..+?)<\|channel\|>commentary"
)


class Read(NamedTuple):
    """What a splitter made of a text."""

    content: str
    calls: list[tuple[str, str]]
    """Names, and the text of the arguments."""
    parts: list[str]
    """Arguments in the order and the parts in which they arrived."""


def read_calls(
    tool_format: ToolFormat,
    pieces: Iterable[str],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    rules: CallRules | None = None,
    cut: bool | None = False,
) -> Read:
    """Feed pieces to a splitter, and end the text unless `cut` is None."""
    splitter = ToolCallSplitter(tool_format, tools, rules)
    read = Read("", [], [])
    out = [part for piece in pieces for part in splitter.feed(piece)]
    content = ""
    for part in [*out, *([] if cut is None else splitter.close(cut=cut))]:
        if isinstance(part, ArgumentsText):
            name, arguments = read.calls[-1]
            read.calls[-1] = (name, arguments + part)
            read.parts.append(part)
        elif isinstance(part, str):
            content += part
        else:
            read.calls.append((part["function"]["name"], part["function"]["arguments"]))
    return read._replace(content=content)


def cut_at(text: str, places: Iterable[int]) -> list[str]:
    """Return the pieces of a text between places."""
    bounds = [0, *sorted({place for place in places if 0 < place < len(text)}), len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds)]


@cache
def _tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(CHECKPOINT))
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    return tokenizer


@cache
def renderer_of(template: str, *, tools_alone: bool = False) -> PromptRenderer:
    """Return the demo model's renderer with another template, or with one for tools alone.

    It finds out once what a template takes, which is most of its work.
    """
    tokenizer = copy(_tokenizer())
    named = {"default": tokenizer.chat_template, "tool_use": template}
    tokenizer.chat_template = named if tools_alone else template
    return PromptRenderer(tokenizer)


def tool_of(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool that declares the types of these arguments."""
    properties = {key: {"type": _KINDS[type(value)]} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    function = {"name": name, "description": "Works", "parameters": parameters}
    return {"type": "function", "function": function}


def written_answer(
    renderer: PromptRenderer, calls: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[str, list[dict[str, Any]]]:
    """Return the text in which a template renders an answer with calls, and the tools."""
    tools = [tool_of(name, arguments) for name, arguments in calls]
    made = [
        {
            "id": f"abcdefgh{index}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    question = {"role": "user", "content": QUESTION}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": RESULT}
        for call, (name, _) in zip(made, calls, strict=True)
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    text = renderer.chat([question, answer, *results], tools)
    begun = renderer.chat([question], tools)
    after = text[len(begun) :] if text.startswith(begun) else text.partition(QUESTION)[2]
    plain = after.rpartition(RESULT)[0] if RESULT in after else after
    for _ in results[1:]:
        plain = plain.rpartition(RESULT)[0] or plain
    plain = plain.replace("\ufdd0", "")
    if _HARMONY_HEADER.match(plain):
        # The engine reads these headers by their tokens, and writes the function behind the
        # channel; the answer ends with the first call.
        plain = _HARMONY_HEADER.sub(r"<|channel|>commentary \1", plain).rpartition("<|call|>")[0]
    return plain, tools


def format_name(template: str) -> str:
    """Return the name of the format of a template's calls; empty without one."""
    known = detect_tool_format(template)
    names = (name for name, one in FORMATS.items() if one is known)
    return next(names, known.parser if known else "")


def _markup(tool_format: ToolFormat) -> list[str]:
    texts = [tool_format.begin, tool_format.end, *tool_format.skip, "{", '"}', "</", "<", "```\n"]
    texts += [call.tags.end for call in tool_format.calls if call.tags]
    return [text for text in texts if text]


class Nature(NamedTuple):
    """What calls a format or a template can write, of which a reader could make the same again."""

    excluded: str = ""
    """Pattern of texts that are ambiguous in it."""
    nested: bool = True
    null: bool = True
    free_keys: bool = True
    calls: int = 3


_TAGGED = Nature(free_keys=False)
_PLAIN = Nature(excluded=r"[^\w ]|^\s|\s$|^$", free_keys=False, nested=False, calls=1)
_NATURES: dict[str, Nature] = {
    # Its strings have no escapes: a quote ends them.
    "gemma4": Nature(excluded=r'<\|"\|>', free_keys=False),
    # mlx-vlm reads a value without its type, so it must look like a text.
    "minimax_m3": _PLAIN._replace(
        calls=3, excluded=r"[^A-Za-z ]|^\s|\s$|^$|^(?i:true|false|null)$"
    ),
}
_BY_TEMPLATE: dict[str, Nature] = {
    # They write a text between quotes as it is.
    "LFM2.5-8B-A1B": Nature(excluded=r"['\\]", free_keys=False),
    # A reader of CDATA needs none of its ends within it, and Python's literals no key but a name.
    "openbmb-MiniCPM5-1B": Nature(excluded=r"[\]<>&]|^\s|\s$|^$", free_keys=False),
}


def nature_of(name: str, tool_format: ToolFormat) -> Nature:
    """Return what calls of a template can be read back."""
    family = next((family for family, known in FORMATS.items() if known is tool_format), "")
    if name in _BY_TEMPLATE:
        return _BY_TEMPLATE[name]
    known = _NATURES.get(family or tool_format.parser)
    if known is not None:
        return known
    python = tool_format is FORMATS["pythonic"]
    return _TAGGED if tool_format.calls[0].tags or python else Nature()


def arguments_of(tool_format: ToolFormat, nature: Nature) -> st.SearchStrategy[dict[str, Any]]:
    """Return arguments that a careless reader would get wrong."""
    stops = [
        TagReader(call.tags, call.tail_pattern, tool_format.end, {}).stop
        for call in tool_format.calls
        if call.tags
    ]

    def is_clear(text: str) -> bool:
        if nature.excluded and re.search(nature.excluded, text):
            return False
        # A text that ends an argument and begins the next one is no text of it.
        return not any(stop.search(text) for stop in stops)

    letters = st.text(
        st.characters(exclude_categories=["Cs", "Cn", "Co"], exclude_characters="\r\x85\u2028")
        | st.sampled_from("\"'\\\n{}[]<>,:=é😀 \t"),
        max_size=12,
    )
    pieces = letters | st.sampled_from([*_markup(tool_format), "\n", "null", "True", "1.5", "[1]"])
    texts: st.SearchStrategy[Any] = st.lists(pieces, max_size=4).map("".join).filter(is_clear)
    numbers = st.integers(-(10**15), 10**15) | st.floats(
        allow_nan=False, allow_infinity=False, width=32
    )
    scalars: st.SearchStrategy[Any] = texts | numbers | st.booleans()
    leaves: st.SearchStrategy[Any] = scalars | st.none() if nature.null else scalars
    identifiers = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
        lambda key: key not in ("items", "keys", "values", "get", "item", "update", "copy", "pop")
    )
    names = texts.filter(bool) if nature.free_keys else identifiers
    values: st.SearchStrategy[Any] = scalars
    if nature.nested:
        values |= st.recursive(
            st.lists(leaves, max_size=3) | st.dictionaries(names, leaves, max_size=3),
            lambda inner: (
                st.lists(inner | leaves, max_size=3)
                | st.dictionaries(names, inner | leaves, max_size=3)
            ),
            max_leaves=6,
        )
    return st.dictionaries(identifiers, values, max_size=4)


def same_json(one: Any, other: Any) -> bool:
    """Compare JSON values, where true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def round_trips(name: str, template: str, calls_wanted: int) -> int:
    """Render about so many calls and read them back; return their number.

    It is 0 for a template that shows no format of calls. Raises `AssertionError` for a call that is
    another one afterwards.
    """
    renderer = renderer_of(template)
    tool_format = renderer.tool_format
    if tool_format is None:
        return 0
    nature = nature_of(name, tool_format)
    most = _most_calls(renderer, nature.calls)
    if not most:
        return 0
    count = 0
    # An answer with up to three calls has one and a half of them on average.
    answers = calls_wanted if most == 1 else calls_wanted * 3 // 4
    calls = st.lists(
        st.tuples(st.sampled_from(_NAMES), arguments_of(tool_format, nature)),
        min_size=1,
        max_size=most,
        unique_by=lambda call: call[0],
    )

    @settings(
        max_examples=answers,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls, st.lists(st.integers(0, 2000), max_size=30))
    def check(made: list[tuple[str, dict[str, Any]]], places: list[int]) -> None:
        nonlocal count
        count += len(made)
        text, tools = written_answer(renderer, made)
        whole = read_calls(tool_format, [text], tools)
        assert [called for called, _ in whole.calls] == [called for called, _ in made], text
        for (_, arguments), (_, given_arguments) in zip(whole.calls, made, strict=True):
            assert same_json(json.loads(arguments), given_arguments), text
        assert tool_format.begin not in whole.content, text
        for pieces in (cut_at(text, places), list(text)):
            streamed = read_calls(tool_format, pieces, tools)
            assert streamed[:2] == whole[:2], (text, pieces)

    check()
    return count


def _most_calls(renderer: PromptRenderer, most: int) -> int:
    """Return how many calls at once a template renders."""
    for calls in range(most, 0, -1):
        made = [(name, {"key": "value"}) for name in _NAMES[:calls]]
        try:
            text, _ = written_answer(renderer, made)
        except InvalidGeneration:
            continue
        if all(name in text for name, _ in made):
            return calls
    return 0
