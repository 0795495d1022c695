"""What one chat template takes of a history, and the smallest change to what it does not.

OpenAI's API allows any order of messages; templates do not. Gemma 2 takes no system message, Llama
3 one call at a time, Qwen 3.5 no chat without a user, and Mistral's templates demand that roles
alternate, though agents write to the user's turn at any time: Claude Code beside the result of a
call. Others leave words out without an error. `find_style` renders probes in which each word must
stand, in order, and so fills one table per template.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, Final

from workers.engine.text.tool_formats import ToolFormat, write_calls

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with tools or without; returns nothing for those that a template rejects."""

_MISTRAL_CALL_ID: Final = re.compile("[a-zA-Z0-9]{9}")
_NAMED_CALL_ID: Final = re.compile(r"functions\..+:\d+")
_REASONING: Final = ("reasoning_content", "reasoning")
_WORD: Final = re.compile(r"Word\d\d")
_CALLED, _ARGUMENT = "Bravo", "Charlie"
BESIDE, BEFORE, IN_TEXT = "beside", "before", "in_text"
"""Places of a text beside calls: there, in a message of its own, or with the calls as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """How a chat template takes the calls of earlier answers and their results."""

    json_arguments: bool = False
    """Whether arguments are JSON text; else they are a mapping."""
    in_text: bool = False
    """Whether calls are a part of the content, because the template renders none."""
    results_in_text: bool = False
    """Whether results are messages of the user, because the template renders none."""
    short_ids: bool = False
    """Whether ids have nine letters and digits."""
    named_ids: bool = False
    """Whether ids hold the names of functions, because the template writes no other."""

    def apply(self, messages: Sequence[Message], tool_format: ToolFormat | None) -> list[Message]:
        """Return the messages as the template takes them."""
        styled: list[Message] = []
        joins = False
        """Whether the last message is a result, to which a message of the user is added."""
        for message in messages:
            one = dict(message)
            is_result = one["role"] == "tool" and self.results_in_text
            if is_result:
                name = one.get("name", "the function")
                one = {
                    "role": "user",
                    "content": joined([f"Result of {name}: ", one["content"]], ""),
                }
            elif calls := one.get("tool_calls"):
                one = self._with_calls(one, calls, tool_format)
            if joins and one["role"] == "user":
                one["content"] = joined([styled.pop()["content"], one["content"]], "\n")
            styled.append(one)
            joins = is_result
        if self.named_ids:
            styled = list(_with_named_ids(styled))
        return [_with_short_ids(message) for message in styled] if self.short_ids else styled

    def _with_calls(
        self, message: Message, calls: list[Message], tool_format: ToolFormat | None
    ) -> Message:
        if self.in_text:
            text = write_calls([call["function"] for call in calls], tool_format)
            plain = {name: value for name, value in message.items() if name != "tool_calls"}
            return {**plain, "content": joined([message["content"], text], "\n")}
        if self.json_arguments:
            functions = [
                {**call["function"], "arguments": _as_json(call["function"]["arguments"])}
                for call in calls
            ]
            calls = [
                {**call, "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
        return {**message, "tool_calls": calls}


_AS_TEXT: Final = CallStyle(in_text=True, results_in_text=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStyle:
    """What a chat template takes; the default of each field is what OpenAI's API allows."""

    parts: bool = False
    """Whether a content must be a list of parts."""
    users: bool = True
    """Whether a message of the user may follow another; else they are one."""
    system: bool = True
    """Whether system messages may begin a chat; else they are words of the user."""
    systems: bool = True
    """Whether several may; else they are one."""
    system_inside: bool = True
    """Whether a system message may stand further on; else it is words of the user there."""
    assistants: bool = True
    """Whether an answer may follow another; else they are one."""
    empty: bool = True
    """Whether an answer may be empty; else it is left out."""
    reasoning: bool = True
    """Whether reasoning may stand beside a text and a call; else it is left out there."""
    opens: bool = True
    """Whether an answer may begin a chat; else a message of the user, `filler`, precedes it."""
    userless: bool = True
    """Whether a chat may have no message of the user; else it gets `filler`."""
    filler: str = ""
    calls: CallStyle = field(default_factory=CallStyle)
    parallel_calls: bool = True
    """Whether a message may have several calls; else each is followed by its result."""
    text_with_calls: str = BESIDE
    """Where a text beside calls stands."""
    user_after_result: bool = True
    """Whether a message of the user may follow a result; else it is a part of that."""
    bridge: str = ""
    """An answer before a user's picture that may not follow a result."""

    @property
    def alternates(self) -> bool:
        """Whether messages of the user are joined to those before them."""
        return not (self.users and self.user_after_result)

    @property
    def changes(self) -> str:
        """Return the fields that say what is changed, for the log."""
        pairs = ((self, HistoryStyle()), (self.calls, CallStyle()))
        return " ".join(
            f"{one.name}={getattr(style, one.name)!r}"
            for style, default in pairs
            for one in fields(style)
            if one.name != "calls" and getattr(style, one.name) != getattr(default, one.name)
        )

    def apply(self, messages: Sequence[Message], tool_format: ToolFormat | None) -> list[Message]:
        """Return messages in a form that the template takes; no text or call of them is lost."""
        turns = self._with_systems(messages)
        if not self.empty:
            turns = [
                one
                for one in turns
                if one["role"] != "assistant" or one.get("content") or one.get("tool_calls")
            ]
        if not self.reasoning:
            turns = [_without_reasoning(one) if _is_full(one) else one for one in turns]
        if not self.assistants:
            turns = _with_answers_joined(turns)
        if self.text_with_calls != BESIDE and not self.calls.in_text:
            turns = list(self._with_texts_apart(turns, tool_format))
        if not self.parallel_calls and not self.calls.in_text:
            turns = list(_one_by_one(turns))
        turns = self._with_users_joined(self.calls.apply(turns, tool_format))
        turns = self._with_user(turns)
        return [_in_parts(one) for one in turns] if self.parts else turns

    def _with_systems(self, messages: Sequence[Message]) -> list[Message]:
        turns: list[Message] = []
        leads = True
        for message in messages:
            turn = message
            if message["role"] != "system":
                leads = False
            elif not (self.system if leads else self.system_inside):
                turn = {**message, "role": "user"}
            elif leads and turns and not self.systems:
                content = joined([turns.pop()["content"], message["content"]])
                turn = {**message, "content": content}
            turns.append(turn)
        return turns

    def _with_texts_apart(
        self, messages: Sequence[Message], tool_format: ToolFormat | None
    ) -> Iterator[Message]:
        """Yield messages without a text beside calls."""
        remaining = deque(messages)
        while remaining:
            message = remaining.popleft()
            if not (message.get("tool_calls") and message.get("content")):
                yield message
            elif self.text_with_calls == BEFORE:
                yield {"role": "assistant", "content": message["content"]}
                yield {**message, "content": ""}
            else:
                own = [message]
                while remaining and remaining[0]["role"] == "tool":
                    own.append(remaining.popleft())
                yield from _AS_TEXT.apply(own, tool_format)

    def _with_users_joined(self, messages: Sequence[Message]) -> list[Message]:
        turns: list[Message] = []
        for message in messages:
            last = turns[-1] if turns else None
            if last is None or message["role"] != "user":
                turns.append(message)
            elif last["role"] == "tool" and not self.user_after_result:
                if isinstance(message["content"], str):
                    turns[-1] = _join(last, message)
                else:
                    turns += [{"role": "assistant", "content": self.bridge}, message]
            elif last["role"] == "user" and not self.users:
                turns[-1] = _join(last, message)
            else:
                turns.append(message)
        return turns

    def _with_user(self, messages: list[Message]) -> list[Message]:
        first = next((at for at, one in enumerate(messages) if one["role"] != "system"), None)
        begun = first is not None and messages[first]["role"] != "user" and not self.opens
        lacks = not self.userless and all(one["role"] != "user" for one in messages)
        if not (begun or lacks):
            return messages
        at = len(messages) if first is None else first
        return [*messages[:at], {"role": "user", "content": self.filler}, *messages[at:]]


def _probe(kinds: str) -> list[Message]:
    """Return a chat with messages of these kinds, and words that number their places.

    S is a system message, U a user's, A an answer, E an empty one, T one with reasoning, F an
    empty one with reasoning, C a call, D two of them, K a text with a call, L that with reasoning,
    and R a result.
    """
    roles = {"S": "system", "U": "user", "R": "tool"}
    chat: list[Message] = []
    count = 0
    open_ids: list[str] = []

    def word() -> str:
        nonlocal count
        count += 1
        return f"Word{count:02d}"

    for kind in kinds:
        message: Message = {"role": roles.get(kind, "assistant"), "content": ""}
        if kind not in "EFCD":
            message["content"] = word()
        if kind in "TFL":
            message["reasoning_content"] = message["reasoning"] = "Perhaps."
        if kind in "CDKL":
            open_ids = [f"abcdefgh{number}" for number in range(1 + (kind == "D"))]
            message["tool_calls"] = [
                {
                    "id": one,
                    "type": "function",
                    "function": {"name": _CALLED, "arguments": {_ARGUMENT: word()}},
                }
                for one in open_ids
            ]
        if kind == "R":
            message |= {"tool_call_id": open_ids.pop(0), "name": _CALLED}
        chat.append(message)
    return chat


class _Prober:
    """Tells whether a template renders a probe with all its words."""

    def __init__(self, render: Render, tool_format: ToolFormat | None) -> None:
        self._render = render
        self._tool_format = tool_format

    def takes(self, style: HistoryStyle, kinds: str) -> bool:
        """Return whether the probe of these kinds is rendered."""
        return self.renders(style, _probe(kinds))

    def renders(self, style: HistoryStyle, chat: Sequence[Message]) -> bool:
        """Return whether all words of a chat stand in its rendering, in their order."""
        calls = [len(one.get("tool_calls", ())) for one in chat]
        text = self._render(style.apply(chat, self._tool_format), any(calls))
        places = [text.find(word) for word in sorted(set(_WORD.findall(repr(chat))))]
        # One at a time, a call stands behind the result of another.
        return min(places) >= 0 and (max(calls) > 1 or places == sorted(places))


_FILLERS: Final = ("", " ", "Continue.")
_TABLE: Final[tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...]] = (
    ("parts", (False, True), ("U", "UAU")),
    ("users", (True, False), ("UU", "UAUU")),
    ("system", (True, False), ("SU", "SUAU")),
    ("systems", (True, False), ("SSU", "SSSU")),
    ("assistants", (True, False), ("UAAU",)),
    ("empty", (True, False), ("UEU", "UAEU", "SUEU", "UFU")),
    ("parallel_calls", (True, False), ("UDRR", "UDRRAU")),
    ("user_after_result", (True, False), ("UCRU", "UCRUAU")),
    ("assistants", (True, False), ("UACRAU",)),
    ("empty", (True, False), ("UFA",)),
    ("text_with_calls", (BESIDE, BEFORE, IN_TEXT), ("UKR", "UKRAU", "UAKRKRU")),
    ("reasoning", (True, False), ("UTU", "ULR", "ULRAU")),
    ("system_inside", (True, False), ("USAU", "SUASU", "USUAU", "UCRSAU", "UCRSU", "UAS")),
)
"""Fields, their values from the one without a change, and the probes that must be rendered."""
_OPENED: Final = ("AU", "SAU", "CRU", "SCRU", "ACRU")
"""Chats that an answer begins."""
_USERLESS: Final = ("S", "SACR", "CR", "ACR")
_MIXED: Final = ("SUACRU", "SUKRCRAUSU", "UCRAKRSU", "UDRRSUTAU", "SSUEUACR")
_ANY_ORDER: Final = (*_MIXED, *_OPENED, *_USERLESS)


def find_style(
    render: Render, tool_format: ToolFormat | None, calls: Callable[[HistoryStyle], CallStyle]
) -> HistoryStyle:
    """Return the table of a template, by probes; the default where it renders nothing."""
    prober = _Prober(render, tool_format)
    style = HistoryStyle()
    known = False
    for name, values, probes in _TABLE:
        if name == "parallel_calls":
            style = replace(style, calls=calls(style))
        for value in values[values.index(getattr(style, name)) :]:
            changed = replace(style, **{name: value})
            if all(prober.takes(changed, one) for one in probes):
                style, known = changed, True
                break
        if not known:
            return style
    further = (
        style,
        replace(style, assistants=False, text_with_calls=IN_TEXT),
        replace(style, calls=_AS_TEXT, assistants=False, users=False, system_inside=False),
    )
    filled = [_with_filler(prober, one) for one in further]
    mixed = (one for one in filled if all(prober.takes(one, kinds) for kinds in _ANY_ORDER))
    return _with_bridge(prober, next(mixed, filled[0]))


def _with_filler(prober: _Prober, style: HistoryStyle) -> HistoryStyle:
    """Return the style with the message that a chat without one of the user needs."""
    opens = all(prober.takes(style, one) for one in _OPENED)
    userless = all(prober.takes(style, one) for one in _USERLESS)
    for filler in () if opens and userless else _FILLERS:
        filled = replace(style, opens=opens, userless=userless, filler=filler)
        if all(prober.takes(filled, one) for one in (*_OPENED, *_USERLESS)):
            return filled
    return style


def _with_bridge(prober: _Prober, style: HistoryStyle) -> HistoryStyle:
    if style.user_after_result:
        return style
    # A picture is no part of a result, so an answer stands between; its word is not looked for.
    open_style = replace(style, user_after_result=True)
    for bridge in _FILLERS:
        chat = _probe("UCRU")
        chat.insert(3, {"role": "assistant", "content": bridge})
        if prober.renders(open_style, chat):
            return replace(style, bridge=bridge)
    return style


def joined(contents: Sequence[Any], separator: str = "\n\n") -> Any:
    """Return one content of a message for several."""
    if all(isinstance(content, str) for content in contents):
        return separator.join(filter(None, contents))
    parts: list[Any] = []
    for content in filter(None, contents):
        parts += [{"type": "text", "text": separator}] if parts and separator else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _join(last: Message, message: Message) -> Message:
    return {**last, "content": joined([last["content"], message["content"]])}


def _with_answers_joined(messages: Sequence[Message]) -> list[Message]:
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        follows = last is not None and last["role"] == message["role"] == "assistant"
        if last is None or not follows or last.get("tool_calls"):
            turns.append(message)
            continue
        thoughts = {
            name: joined([one[name] for one in (last, message) if one.get(name)])
            for name in _REASONING
            if last.get(name) or message.get(name)
        }
        turns[-1] = {**message, **thoughts, "content": _join(last, message)["content"]}
    return turns


def _is_full(message: Message) -> bool:
    return bool(message.get("content") and message.get("tool_calls"))


def _without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in _REASONING}


def _in_parts(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return {**message, "content": content}


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with one call each, followed by its results."""
    remaining = deque(messages)
    while remaining:
        message = remaining.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results = []
        while remaining and remaining[0]["role"] == "tool":
            results.append(remaining.popleft())
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": "assistant", "content": ""}
            own = [one for one in results if one.get("tool_call_id") == call.get("id")]
            yield from own
            results = [one for one in results if one not in own]
        yield from results


def _as_json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _with_named_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with ids of tool calls as Kimi's models write them, counted over the chat."""
    count = 0
    named: dict[str, str] = {}
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            given = call.get("id") or ""
            written = f"functions.{call['function']['name']}:{count}"
            named[given] = given if _NAMED_CALL_ID.fullmatch(given) else written
            calls.append({**call, "id": named[given]})
            count += 1
        if calls:
            yield {**message, "tool_calls": calls}
        elif given := message.get("tool_call_id"):
            yield {**message, "tool_call_id": named.get(given, given)}
        else:
            yield message


def _with_short_ids(message: Mapping[str, Any]) -> Message:
    """Return a message with ids of tool calls as Mistral's templates require them."""
    short = dict(message)
    if "tool_call_id" in short:
        short["tool_call_id"] = _short_id(short["tool_call_id"])
    if "tool_calls" in short:
        short["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if call.get("id") else call
            for call in short["tool_calls"]
        ]
    return short


def _short_id(given: str) -> str:
    """Return nine letters and digits for an id of a tool call; vLLM shortens ids alike."""
    if _MISTRAL_CALL_ID.fullmatch(given):
        return given
    return blake2b(given.encode(), digest_size=5).hexdigest()[:9]
