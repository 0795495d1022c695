"""The limits of a chat template: histories that it refuses, and the smallest change of each.

OpenAI's API allows any order of messages; templates do not. Gemma 2 takes no system message, Llama
3 one call at a time, Qwen 3.5 no chat without a user, and Mistral's templates demand that roles
alternate, though agents write to the user's turn at any time: Claude Code beside the result of a
call. Others leave words out without an error. `find_limits` renders probes in which each word must
stand, in order, and so fills one table per template.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from itertools import count
from typing import Any, Final

from workers.engine.text.tool_formats import ToolFormat, to_json, write_calls

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with tools or without; returns nothing for messages that a template rejects."""

CALLED, ARGUMENT, _RESULT = "Bravo", "Charlie", "Echo"
_SHORT_ID: Final = re.compile("[a-zA-Z0-9]{9}")
_NAMED_ID: Final = re.compile(r"functions\..+:\d+")
_REASONING: Final = ("reasoning_content", "reasoning")
_WORD: Final = re.compile(r"Word\d\d")
BESIDE, BEFORE, IN_TEXT = "beside", "before", "in_text"
"""Places of a text beside calls: there, in a separate message, or with the calls as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """The limits of a chat template; the default of each field is the limit of OpenAI's API."""

    tool_format: ToolFormat | None = field(default=None, compare=False)
    """The format of the model's calls, which says how calls are written as text, and their ids."""
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
    parallel_calls: bool = True
    """Whether a message may have several calls; else each is followed by its result."""
    text_with_calls: str = BESIDE
    """Where a text beside calls stands."""
    user_after_result: bool = True
    """Whether a message of the user may follow a result; else it is a part of that."""
    bridge: str = ""
    """An answer before a user's picture that may not follow a result."""
    json_arguments: bool = False
    """Whether arguments of calls are JSON text; else they are a mapping."""
    calls_in_text: bool = False
    """Whether calls are a part of the content, because the template renders none."""
    results_in_text: bool = False
    """Whether results are messages of the user, because the template renders none."""

    @property
    def alternates(self) -> bool:
        """Whether messages of the user are joined to those before them."""
        return not (self.users and self.user_after_result)

    @property
    def changes(self) -> str:
        """Return the fields that name the changes, for the log."""
        pairs = [(one.name, getattr(self, one.name)) for one in fields(self) if one.compare]
        default = TemplateLimits()
        return " ".join(
            f"{name}={value!r}" for name, value in pairs if value != getattr(default, name)
        )

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in a form that the template takes; no text or call of them is lost."""
        turns = self._with_systems(messages)
        if not self.empty:
            turns = [
                one
                for one in turns
                if one["role"] != "assistant" or one.get("content") or one.get("tool_calls")
            ]
        if not self.reasoning:
            turns = [
                {name: value for name, value in one.items() if name not in _REASONING}
                if one.get("content") and one.get("tool_calls")
                else one
                for one in turns
            ]
        if not self.assistants:
            turns = _with_answers_joined(turns)
        if self.text_with_calls != BESIDE and not self.calls_in_text:
            turns = [one for group in _groups(turns) for one in self._with_text_apart(group)]
        if not self.parallel_calls and not self.calls_in_text:
            turns = [one for group in _groups(turns) for one in _one_by_one(group)]
        turns = self._with_user(self._with_users_joined(self._with_calls(turns)))
        if self.parts:
            turns = [
                {**one, "content": [{"type": "text", "text": one["content"]}]}
                if isinstance(one["content"], str)
                else one
                for one in turns
            ]
        return turns

    def _with_systems(self, messages: Sequence[Message]) -> list[Message]:
        turns: list[Message] = []
        leads = True
        for message in messages:
            leads = leads and message["role"] == "system"
            if message["role"] != "system":
                turns.append(message)
            elif not (self.system if leads else self.system_inside):
                turns.append({**message, "role": "user"})
            elif leads and turns and not self.systems:
                turns.append(_join(turns.pop(), message))
            else:
                turns.append(message)
        return turns

    def _with_text_apart(self, group: list[Message]) -> Iterator[Message]:
        """Yield a message without a text beside calls, and the results behind it."""
        message, *results = group
        if not (message.get("tool_calls") and message.get("content")):
            yield from group
        elif self.text_with_calls == BEFORE:
            yield {"role": "assistant", "content": message["content"]}
            yield {**message, "content": ""}
            yield from results
        else:
            yield from self._with_calls(group, as_text=True)

    def _with_calls(self, messages: Sequence[Message], *, as_text: bool = False) -> list[Message]:
        """Return messages whose calls and results are written as the template takes them."""
        turns: list[Message] = []
        joins = False
        """Whether the last message is a result, to which a message of the user is added."""
        for message in messages:
            turn = message
            is_result = turn["role"] == "tool" and (as_text or self.results_in_text)
            if is_result:
                head = f"Result of {turn.get('name', 'the function')}: "
                turn = {"role": "user", "content": joined([head, turn["content"]], "")}
            elif calls := turn.get("tool_calls"):
                functions = [call["function"] for call in calls]
                if as_text or self.calls_in_text:
                    text = write_calls(functions, self.tool_format)
                    turn = {**turn, "content": joined([turn["content"], text], "\n")}
                    del turn["tool_calls"]
                elif self.json_arguments:
                    written = [
                        {**call, "function": {**one, "arguments": to_json(one["arguments"])}}
                        for call, one in zip(calls, functions, strict=True)
                    ]
                    turn = {**turn, "tool_calls": written}
            if joins and turn["role"] == "user":
                turn = {**turn, "content": joined([turns.pop()["content"], turn["content"]], "\n")}
            turns.append(turn)
            joins = is_result
        return list(_with_ids(turns, self.tool_format))

    def _with_users_joined(self, messages: Sequence[Message]) -> list[Message]:
        turns: list[Message] = []
        for message in messages:
            last = turns[-1]["role"] if turns and message["role"] == "user" else ""
            if last == "tool" and not self.user_after_result:
                if isinstance(message["content"], str):
                    turns[-1] = _join(turns[-1], message)
                else:
                    turns += [{"role": "assistant", "content": self.bridge}, message]
            elif last == "user" and not self.users:
                turns[-1] = _join(turns[-1], message)
            else:
                turns.append(message)
        return turns

    def _with_user(self, messages: list[Message]) -> list[Message]:
        roles = [one["role"] for one in messages]
        at = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
        begun = not self.opens and roles[at : at + 1] not in ([], ["user"])
        if not begun and (self.userless or "user" in roles):
            return messages
        return [*messages[:at], {"role": "user", "content": self.filler}, *messages[at:]]


def _probe(kinds: str) -> list[Message]:
    """Return a chat with messages of these kinds, and words that number their places.

    S is a system message, U a user's, A an answer, E an empty one, T one with reasoning, F an
    empty one with reasoning, C a call, D two of them, K a text with a call, L that with reasoning,
    and R a result.
    """
    roles = {"S": "system", "U": "user", "R": "tool"}
    words = (f"Word{number:02d}" for number in count(1))
    chat: list[Message] = []
    open_ids: list[str] = []
    for kind in kinds:
        message: Message = {"role": roles.get(kind, "assistant"), "content": ""}
        if kind not in "EFCD":
            message["content"] = next(words)
        if kind in "TFL":
            message["reasoning_content"] = message["reasoning"] = "Perhaps."
        if kind in "CDKL":
            open_ids = [f"abcdefgh{number}" for number in range(1 + (kind == "D"))]
            message["tool_calls"] = [_call(one, next(words)) for one in open_ids]
        if kind == "R":
            message |= {"tool_call_id": open_ids.pop(0), "name": CALLED}
        chat.append(message)
    return chat


def _call(call_id: str, word: str) -> Message:
    function = {"name": CALLED, "arguments": {ARGUMENT: word}}
    return {"id": call_id, "type": "function", "function": function}


CALL_CHAT: Final[Sequence[Message]] = (
    {"role": "user", "content": "Alpha"},
    {"role": "assistant", "content": "", "tool_calls": [_call("abcdefgh1", "Delta")]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "name": CALLED, "content": _RESULT},
)
"""A chat with a call and its result."""
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
_FIRST: Final = (*_OPENED, "S", "SACR", "CR", "ACR")
"""These, and chats without a user."""
_MIXED: Final = ("SUACRU", "SUKRCRAUSU", "UCRAKRSU", "UDRRSUTAU", "SSUEUACR")


def find_limits(render: Render, tool_format: ToolFormat | None) -> TemplateLimits:
    """Return the table of a template, by probes; the default where it renders nothing."""
    limits = TemplateLimits(tool_format=tool_format)
    known = False
    for name, values, probes in _TABLE:
        if name == "parallel_calls":
            limits = _with_call_limits(render, limits)
        for value in values[values.index(getattr(limits, name)) :]:
            changed = replace(limits, **{name: value})
            if _takes(render, changed, probes):
                limits, known = changed, True
                break
        if not known:
            return limits
    as_text = replace(limits, calls_in_text=True, results_in_text=True, json_arguments=False)
    further = (
        limits,
        replace(limits, assistants=False, text_with_calls=IN_TEXT),
        replace(as_text, assistants=False, users=False, system_inside=False),
    )
    filled = [_with_filler(render, one) for one in further]
    taken = (one for one in filled if _takes(render, one, (*_MIXED, *_FIRST)))
    limits = next(taken, filled[0])
    # A picture is no part of a result, so an answer stands between; its word is not looked for.
    *begin, last = _probe("UCRU")
    for bridge in () if limits.user_after_result else _FILLERS:
        bridged = [*begin, {"role": "assistant", "content": bridge}, last]
        if _renders(render, replace(limits, user_after_result=True), bridged):
            return replace(limits, bridge=bridge)
    return limits


def _takes(render: Render, limits: TemplateLimits, probes: Iterable[str]) -> bool:
    return all(_renders(render, limits, _probe(kinds)) for kinds in probes)


def _renders(render: Render, limits: TemplateLimits, chat: Sequence[Message]) -> bool:
    """Return whether all words of a chat stand in its rendering, in their order."""
    calls = [len(one.get("tool_calls", ())) for one in chat]
    text = render(limits.apply(chat), any(calls))
    places = [text.find(word) for word in sorted(set(_WORD.findall(repr(chat))))]
    # One at a time, a call stands behind the result of another.
    return min(places) >= 0 and (max(calls) > 1 or places == sorted(places))


def _with_call_limits(render: Render, limits: TemplateLimits) -> TemplateLimits:
    """Return how the template takes calls and results: the first way that renders both."""
    ways = [replace(limits, json_arguments=as_json) for as_json in (False, True)]
    rendered = [(way, render(way.apply(CALL_CHAT), True)) for way in ways]
    shown = [
        (way, text)
        for way, text in rendered
        if CALLED in text and ARGUMENT in text
        # Quotes within a text, or within markup, to which a template adds a mapping.
        if f'\\"{ARGUMENT}' not in text and f"&#34;{CALLED}" not in text
    ]
    if not shown:
        in_text = not any(_RESULT in text for _, text in rendered)
        return replace(limits, calls_in_text=True, results_in_text=in_text)
    # Python writes a mapping in these quotes where a template expects JSON text.
    as_json = (pair for pair in shown if f"'{ARGUMENT}'" not in pair[1])
    way, text = next(as_json, shown[0])
    return replace(way, results_in_text=_RESULT not in text)


def _with_filler(render: Render, limits: TemplateLimits) -> TemplateLimits:
    """Return the limits with the message that a chat without one of the user needs."""
    opens, userless = (
        _takes(render, limits, probes) for probes in (_OPENED, _FIRST[len(_OPENED) :])
    )
    for filler in () if opens and userless else _FILLERS:
        filled = replace(limits, opens=opens, userless=userless, filler=filler)
        if _takes(render, filled, _FIRST):
            return filled
    return limits


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
        last = turns[-1] if turns else {"role": ""}
        if not last["role"] == message["role"] == "assistant" or last.get("tool_calls"):
            turns.append(message)
            continue
        both = {
            name: joined([one[name] for one in (last, message) if one.get(name)])
            for name in _REASONING
            if last.get(name) or message.get(name)
        }
        turns[-1] = {**message, **both, "content": _join(last, message)["content"]}
    return turns


def _groups(messages: Sequence[Message]) -> list[list[Message]]:
    """Return each message with the results of calls that follow it."""
    groups: list[list[Message]] = []
    for message in messages:
        if groups and message["role"] == "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def _one_by_one(group: list[Message]) -> Iterator[Message]:
    """Yield a message with one call at a time, each followed by its results."""
    message, *results = group
    calls = message.get("tool_calls") or ()
    if len(calls) < 2:
        yield from group
        return
    for call in calls:
        yield {**message, "tool_calls": [call]}
        message = {"role": "assistant", "content": ""}
        own = [one for one in results if one.get("tool_call_id") == call.get("id")]
        yield from own
        results = [one for one in results if one not in own]
    yield from results


def _with_ids(messages: Sequence[Message], known: ToolFormat | None) -> Iterator[Message]:
    """Yield messages with the ids of calls that a template takes, if it takes no other.

    Kimi's models write ids that name the function, counted over the chat; Mistral's templates
    require nine letters and digits.
    """
    named, short = (known.named_ids, known.short_ids) if known else (False, False)
    numbers = count()
    written: dict[str, str] = {}
    for message in messages:
        turn = dict(message)
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = []
            for call in calls:
                given, number = call.get("id") or "", next(numbers)
                if named and not _NAMED_ID.fullmatch(given):
                    written[given] = f"functions.{call['function']['name']}:{number}"
                own = _short_id(given) if short and given else written.get(given, given)
                turn["tool_calls"].append({**call, "id": own} if own else call)
        elif given := message.get("tool_call_id"):
            turn["tool_call_id"] = _short_id(given) if short else written.get(given, given)
        yield turn


def _short_id(given: str) -> str:
    """Return nine letters and digits for an id of a tool call; vLLM shortens ids alike."""
    if _SHORT_ID.fullmatch(given):
        return given
    return blake2b(given.encode(), digest_size=5).hexdigest()[:9]
