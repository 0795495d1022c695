"""Reasoning: the part of an answer in which a model thinks, recognized by its token ids.

Families mark it in two ways. Most put it between two tokens, of which the template may write the
first: `<think>` and `</think>`, Mistral's `[THINK]`, Gemma's `<|channel>thought`. In harmony, the
format of gpt-oss, an answer is a series of messages, each with a channel in its header: `analysis`
is reasoning, `final` is the answer, and `commentary` calls tools.

A state follows one answer token by token. It also tells what must come next, so that a budget ends
the reasoning at its last token, and a grammar begins after it; the decoder asks a copy of it about
the tokens of a draft.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, Self

import jinja2
from jinja2 import meta

from paceline.request.profile import REASONING_EFFORTS
from workers.engine.text.detokenizer import TextStream

MARKS = (
    ("<think>", "</think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<|channel>", "<channel|>", "thought\n"),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
    ("<seed:think>", "</seed:think>", ""),
    ("<mm:think>", "</mm:think>", ""),
)
"""Tokens that begin and end reasoning, and the text that follows the first: Qwen, DeepSeek and
many others; Mistral; Gemma; Cohere; Seed; MiniMax."""
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_SWITCHES: Mapping[str, tuple[bool | str, bool | str]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "reasoning": (False, True),
    "thinking_mode": ("disabled", "enabled"),
    "thinking_option": ("off", "on"),
}
"""Variables of templates that switch reasoning off and on."""
_EFFORTS = ("reasoning_effort", "thinking_effort")
_QUOTED = re.compile("[\"']([a-z_]+)[\"']")
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_PROMPT_END_TOKENS = 32
"""A template that begins or ends the reasoning writes little after its mark."""


class Part(Enum):
    """The part of an answer that a token belongs to."""

    REASONING = auto()
    ANSWER = auto()
    MARK = auto()
    """No text: it begins, names or ends a part."""


class NextToken(NamedTuple):
    """The tokens that may come next in an answer."""

    forced: int | None = None
    """The only token that may come."""
    answering: bool = False
    """Whether the grammar of the answer decides, if there is one."""
    beginning: int | None = None
    """A token that may come instead, to begin the reasoning."""
    may_end: bool = True
    """Whether the answer may end here although a grammar has yet to begin."""


ANSWERING = NextToken(answering=True)
_REASONING = NextToken(may_end=False)


@dataclass(slots=True, kw_only=True)
class ReasoningState(ABC):
    """The place of one answer in the format of its tokenizer; before one, the format itself."""

    budget: int | None = None
    """The most tokens of reasoning."""
    constrained: bool = False
    """Whether a grammar describes the answer, so that only reasoning may precede it."""
    call_mark: int | None = None
    """Begins a call, which ends the reasoning too: models forget the mark before it."""
    open: bool = False
    """Whether the next token is reasoning."""
    closing: tuple[int, ...] = ()
    """Tokens that end the reasoning."""
    due: tuple[int, ...] = ()
    """Tokens that must come next."""
    reasoning_tokens: int = 0
    """Tokens of reasoning so far, marks excluded."""

    def begin(
        self,
        prompt: Sequence[int],
        budget: int | None = None,
        *,
        constrained: bool = False,
        call_mark: int | None = None,
    ) -> Self:
        """Return the state at the beginning of the answer to a prompt."""
        state = replace(self, budget=budget, constrained=constrained, call_mark=call_mark)
        state.enter(list(prompt[-_PROMPT_END_TOKENS:]))
        return state

    @abstractmethod
    def enter(self, tail: list[int]) -> None:
        """Take the last tokens of the prompt."""

    @abstractmethod
    def push(self, token: int) -> tuple[Part, Sequence[int]]:
        """Take the next token; return its part, and the tokens that it adds to that part."""

    @abstractmethod
    def _next_free(self) -> NextToken: ...

    @property
    def _left(self) -> float:
        return inf if self.budget is None else self.budget - self.reasoning_tokens

    def next_token(self) -> NextToken:
        """Return the tokens that may come next."""
        if self.due or (self.open and self._left <= 0):
            return NextToken(forced=(self.due or self.closing)[0])
        return self._next_free()

    def may_force(self, tokens: int) -> bool:
        """Return whether one of the next tokens, after at most `tokens` others, may be forced."""
        return bool(self.due) or self._left <= tokens

    def forced(self) -> Sequence[int]:
        """Return the next tokens that are forced, with -1 for each free token before them."""
        if self.due or not self.open or self.budget is None:
            return self.due
        return (*[-1] * (self.budget - self.reasoning_tokens), *self.closing)


@dataclass(slots=True)
class Reasoning:
    """The reasoning of one answer: its state and its text."""

    state: ReasoningState
    text: TextStream


@dataclass(slots=True, kw_only=True)
class MarkedReasoning(ReasoningState):
    """Reasoning between two tokens."""

    begin_mark: int
    end_mark: int
    label: tuple[int, ...]
    """Tokens that follow the first mark and belong to it."""
    repeats: bool
    """Whether reasoning may begin anywhere; else only before the answer, because the mark is a
    text that an answer may contain."""
    is_blank: Callable[[int], bool]
    """Whether a token is white space."""
    closed: bool = False
    """Whether the answer has begun."""

    def enter(self, tail: list[int]) -> None:
        """Take the last tokens of the prompt, which may end with either mark."""
        while tail and self.is_blank(tail[-1]):
            tail.pop()
        label = [token for token in self.label if not self.is_blank(token)]
        if label and tail[-len(label) :] == label:
            del tail[-len(label) :]
        self.open, self.closed = (tail[-1:] == [mark] for mark in (self.begin_mark, self.end_mark))

    def _next_free(self) -> NextToken:
        if self.open:
            return _REASONING
        if self.closed:
            return ANSWERING
        return NextToken(answering=True, beginning=self.begin_mark)

    def push(self, token: int) -> tuple[Part, Sequence[int]]:
        """Take the next token; return its part, and the tokens that it adds to that part."""
        if self.open:
            calls = token == self.call_mark and not self.constrained
            if token == self.end_mark or calls:
                self.open, self.closed = False, True
                return (Part.ANSWER, (token,)) if calls else (Part.MARK, ())
            if token == self.closing[0]:  # of the label
                self.closing = self.closing[1:]
                return Part.MARK, ()
            self.closing = (self.end_mark,)
            self.reasoning_tokens += 1
            return Part.REASONING, (token,)
        if token == self.begin_mark and (self.repeats or not self.closed):
            self.open, self.closing = True, (*self.label, self.end_mark)
            return Part.MARK, ()
        self.closed = self.closed or self.constrained or not self.is_blank(token)
        return Part.ANSWER, (token,)

    def may_force(self, tokens: int) -> bool:
        """Return whether one of the next tokens, after at most `tokens` others, may be forced."""
        return (self.open or self.repeats or not self.closed) and self._left <= tokens


@dataclass(slots=True, kw_only=True)
class HarmonyReasoning(ReasoningState):
    """Messages with channels, as gpt-oss writes them."""

    start: int
    channel: int
    message: int
    end: int
    commentary: tuple[int, ...]
    """Name of the channel for calls."""
    decode: Callable[[Sequence[int]], str]
    header: tuple[int, ...] | None = ()
    """Tokens of the header so far; None within a message."""
    named: str = ""
    """Channel of the message."""

    def enter(self, tail: list[int]) -> None:
        """Take the message that the prompt begins."""
        if self.start in tail:
            for token in tail[len(tail) - tail[::-1].index(self.start) - 1 :]:
                self.push(token)
            self.reasoning_tokens = 0

    def _next_free(self) -> NextToken:
        if self.header is None and self.named == "final":
            return ANSWERING
        return NextToken(may_end=self.named == "call")

    def push(self, token: int) -> tuple[Part, Sequence[int]]:
        """Take the next token; return its part, and the tokens that it adds to that part."""
        if self.due:
            self.due = self.due[1:]
        elif token == self.end and self.open and (self.constrained or self._left <= 0):
            self.due = self.closing[1:]
        if self.header is None:
            if token in (self.start, self.channel, self.end):
                self.header, self.open = () if token == self.end else (token,), False
                return Part.MARK, ()
            self.reasoning_tokens += self.open
            return Part.REASONING if self.open else Part.ANSWER, (token,)
        header = self.header = (*self.header, token)
        if token != self.message:
            return Part.MARK, ()
        self.header = None
        at = header.index(self.channel) if self.channel in header else -1
        self.named = (self.decode(header[at + 1 : -1]).split() or ["final"])[0]
        if "to=functions" in self.decode(header):
            self.named = "call"  # the model may write it to any channel
            return Part.ANSWER, self._call_header(header, at)
        self.open = self.named == "analysis"
        return Part.MARK, ()

    def _call_header(self, header: tuple[int, ...], at: int) -> tuple[int, ...]:
        """Return the header of a call with its function after the channel, which is at `at`."""
        role = self.closing[1 : self.closing.index(self.channel)]
        function = header[:at]
        if function[: len(role)] == role:
            function = function[len(role) :]
        if not function:
            return header[at:]
        return (self.channel, *self.commentary, *function, self.message)


def detect_reasoning(tokenizer: Any, template: str) -> ReasoningState | None:
    """Return the format that a chat template uses, if the tokenizer has a token for each mark."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    tokens = {token.content: index for index, token in added.items()}

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(answer: Sequence[int]) -> str:
        return str(tokenizer.decode(list(answer), skip_special_tokens=True))

    if tokens.keys() >= {*HARMONY} and "<|channel|>analysis" in template:
        start, channel, message, end = (tokens[mark] for mark in HARMONY)
        return HarmonyReasoning(
            start=start,
            channel=channel,
            message=message,
            end=end,
            closing=(end, start, *encode("assistant"), channel, *encode("final"), message),
            commentary=encode("commentary"),
            decode=decode,
        )
    for begin, end_mark, label in MARKS:
        if begin in tokens and end_mark in tokens and end_mark in template:
            return MarkedReasoning(
                begin_mark=tokens[begin],
                end_mark=tokens[end_mark],
                closing=(tokens[end_mark],),
                label=encode(label) if label else (),
                repeats=bool(added[tokens[begin]].special),
                is_blank=lambda token: token not in added and not decode([token]).strip(),
            )
    return None


def effort_variables(template: str, effort: str) -> dict[str, Any]:
    """Return a chat template's variables for a reasoning effort.

    An effort that the template does not know becomes the highest one below it, or its lowest.
    """
    known = template_variables(template)
    variables: dict[str, Any] = {
        name: values[effort != "none"] for name, values in _SWITCHES.items() if name in known
    }
    lines = [line for line in template.splitlines() if "effort" in line]
    named = {name for line in lines for name in _QUOTED.findall(line)}
    levels = named.intersection(REASONING_EFFORTS) - {"none"}
    if not any("raise_exception" in line for line in lines):
        levels |= {"low", "medium", "high"}  # a template that takes any text need not name them
    ranked = sorted(levels, key=REASONING_EFFORTS.index)
    asked = REASONING_EFFORTS.index(effort)
    below = [level for level in ranked if REASONING_EFFORTS.index(level) <= asked]
    level = next(iter(below[-1:] or ranked[:1]), None)
    if effort == "none":
        off = next((name for name in ("none", "no_think") if name in named), None)
        if off is None and variables:
            return variables
        level = off or level
    return variables | {name: level for name in _EFFORTS if level and name in known}


@lru_cache(maxsize=8)
def template_variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a template reads."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    try:
        parsed = environment.parse(_GENERATION_TAG.sub("", template))
    except (jinja2.TemplateError, RecursionError):
        return frozenset()  # it renders nothing either
    return frozenset(meta.find_undeclared_variables(parsed))
