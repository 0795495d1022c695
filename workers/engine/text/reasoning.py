"""Reasoning: the part of an answer in which a model thinks, told from the rest by its token ids.

Families mark it in two ways. Most put it between two tokens, of which the template may write the
first: `<think>` and `</think>`, Mistral's `[THINK]`, Gemma's `<|channel>thought`. In harmony, the
format of gpt-oss, an answer is a series of messages, each with a channel in its header: `analysis`
is reasoning, `final` is the answer, and `commentary` calls tools.

A state follows one answer token by token. It also tells what must come next, so that a budget ends
the reasoning at its last token, and a grammar begins after it; the decoder asks a copy of it about
the tokens of a draft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, Protocol

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
"""Variables by which templates switch reasoning off and on."""
_EFFORTS = ("reasoning_effort", "thinking_effort")
_QUOTED = re.compile("[\"']([a-z_]+)[\"']")
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_PROMPT_END_TOKENS = 32
"""A template that begins or ends the reasoning writes little after its mark."""


class Part(Enum):
    """What a token of an answer belongs to."""

    REASONING = auto()
    ANSWER = auto()
    MARK = auto()
    """No text: it begins, names or ends a part."""


class NextToken(NamedTuple):
    """What may come next in an answer."""

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


class ReasoningState(Protocol):
    """The place of one answer in its format."""

    reasoning_tokens: int
    """Tokens of reasoning so far, marks excluded."""

    def next_token(self) -> NextToken:
        """Return what may come next."""

    def push(self, token: int) -> tuple[Part, Sequence[int]]:
        """Take the next token; return its part, and the tokens that it adds to that part."""

    def may_force(self, tokens: int) -> bool:
        """Return whether one of the next tokens, after at most `tokens` others, may be forced."""

    def forced(self) -> Sequence[int]:
        """Return the next tokens that are forced, with -1 for each free token before them."""


class ReasoningFormat(Protocol):
    """The marks of one tokenizer."""

    def begin(
        self,
        prompt: Sequence[int],
        budget: int | None = None,
        *,
        constrained: bool = False,
        call_mark: int | None = None,
    ) -> ReasoningState:
        """Return the state at the beginning of the answer to a prompt.

        `constrained` says that a grammar describes the answer. `call_mark` begins a call, which
        ends the reasoning too: models forget the mark before it.
        """


@dataclass(slots=True)
class Reasoning:
    """The reasoning of one answer: its state and its text."""

    state: ReasoningState
    text: TextStream


@dataclass(frozen=True, slots=True)
class MarkedReasoning:
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

    def begin(
        self,
        prompt: Sequence[int],
        budget: int | None = None,
        *,
        constrained: bool = False,
        call_mark: int | None = None,
    ) -> MarkedState:
        """Return the state after a prompt, which may end with either mark."""
        state = MarkedState(self, budget, constrained, None if constrained else call_mark)
        tail = list(prompt[-_PROMPT_END_TOKENS:])
        while tail and self.is_blank(tail[-1]):
            tail.pop()
        label = [token for token in self.label if not self.is_blank(token)]
        if label and tail[-len(label) :] == label:
            del tail[-len(label) :]
        if tail:
            state.open, state.closed = tail[-1] == self.begin_mark, tail[-1] == self.end_mark
        return state


@dataclass(slots=True)
class MarkedState:
    """The state of reasoning between two tokens."""

    format: MarkedReasoning
    budget: int | None
    constrained: bool
    call_mark: int | None
    open: bool = False
    """Whether the next token is reasoning."""
    closed: bool = False
    """Whether the answer has begun."""
    label: tuple[int, ...] = ()
    """What is left of the label."""
    reasoning_tokens: int = 0

    def next_token(self) -> NextToken:
        """Return what may come next."""
        if self.open:
            over = self.budget is not None and self.reasoning_tokens >= self.budget
            return NextToken(forced=self._closing[0]) if over else _REASONING
        if self.closed:
            return ANSWERING
        return NextToken(answering=True, beginning=self.format.begin_mark)

    def push(self, token: int) -> tuple[Part, Sequence[int]]:
        """Take the next token; return its part, and the tokens that it adds to that part."""
        marks = self.format
        if self.open:
            if token == marks.end_mark:
                self.open, self.closed = False, True
                return Part.MARK, ()
            if self.label and token == self.label[0]:
                self.label = self.label[1:]
                return Part.MARK, ()
            if token == self.call_mark:
                self.open, self.closed = False, True
                return Part.ANSWER, (token,)
            self.label = ()
            self.reasoning_tokens += 1
            return Part.REASONING, (token,)
        if token == marks.begin_mark and (marks.repeats or not self.closed):
            self.open, self.label = True, marks.label
            return Part.MARK, ()
        self.closed = self.closed or self.constrained or not marks.is_blank(token)
        return Part.ANSWER, (token,)

    def may_force(self, tokens: int) -> bool:
        """Return whether one of the next tokens, after at most `tokens` others, may be forced."""
        may_reason = self.open or self.format.repeats or not self.closed
        return may_reason and _left(self.budget, self.reasoning_tokens) <= tokens

    def forced(self) -> Sequence[int]:
        """Return the next tokens that are forced, with -1 for each free token before them."""
        if not self.open or self.budget is None:
            return ()
        return (*[-1] * (self.budget - self.reasoning_tokens), *self._closing)

    @property
    def _closing(self) -> tuple[int, ...]:
        return (*self.label, self.format.end_mark)


@dataclass(frozen=True, slots=True)
class HarmonyReasoning:
    """Messages with channels, as gpt-oss writes them."""

    start: int
    channel: int
    message: int
    end: int
    closing: tuple[int, ...]
    """Tokens that end a message and begin the final one."""
    commentary: tuple[int, ...]
    """Name of the channel for calls."""
    decode: Callable[[Sequence[int]], str]

    def begin(
        self,
        prompt: Sequence[int],
        budget: int | None = None,
        *,
        constrained: bool = False,
        call_mark: int | None = None,
    ) -> HarmonyState:
        """Return the state within the message that the prompt begins."""
        del call_mark  # calls have a channel
        state = HarmonyState(self, budget, constrained)
        tail = list(prompt[-_PROMPT_END_TOKENS:])
        if self.start in tail:
            for token in tail[len(tail) - tail[::-1].index(self.start) - 1 :]:
                state.push(token)
            state.reasoning_tokens = 0
        return state

    def call_header(self, header: tuple[int, ...], at: int) -> tuple[int, ...]:
        """Return the header of a call with its function after the channel, which is at `at`."""
        role = self.closing[1 : self.closing.index(self.channel)]
        function = header[:at]
        if function[: len(role)] == role:
            function = function[len(role) :]
        if not function:
            return header[at:]
        return (self.channel, *self.commentary, *function, self.message)


@dataclass(slots=True)
class HarmonyState:
    """The state of an answer in channels."""

    format: HarmonyReasoning
    budget: int | None
    constrained: bool
    """Whether a grammar describes the final message, so that only reasoning may precede it."""
    header: tuple[int, ...] | None = ()
    """Tokens of the header so far; None within a message."""
    channel: str = ""
    """Channel of the message."""
    closing: tuple[int, ...] = ()
    """Tokens that must come next."""
    reasoning_tokens: int = 0

    def next_token(self) -> NextToken:
        """Return what may come next."""
        if self.closing or self._over_budget:
            return NextToken(forced=(self.closing or self.format.closing)[0])
        if self.header is None and self.channel == "final":
            return ANSWERING
        return NextToken(may_end=self.channel == "call")

    def push(self, token: int) -> tuple[Part, Sequence[int]]:
        """Take the next token; return its part, and the tokens that it adds to that part."""
        marks = self.format
        if self.closing:
            self.closing = self.closing[1:]
        elif token == marks.end and (self._over_budget or (self.constrained and self._inside)):
            self.closing = marks.closing[1:]
        if self.header is None:
            if token in (marks.start, marks.channel, marks.end):
                self.header = () if token == marks.end else (token,)
                return Part.MARK, ()
            if self._inside:
                self.reasoning_tokens += 1
                return Part.REASONING, (token,)
            return Part.ANSWER, (token,)
        header = self.header = (*self.header, token)
        if token != marks.message:
            return Part.MARK, ()
        self.header = None
        at = header.index(marks.channel) if marks.channel in header else -1
        self.channel = (marks.decode(header[at + 1 : -1]).split() or ["final"])[0]
        if "to=functions" not in marks.decode(header):
            return Part.MARK, ()
        self.channel = "call"  # the model may write it to any channel
        return Part.ANSWER, marks.call_header(header, at)

    def may_force(self, tokens: int) -> bool:
        """Return whether one of the next tokens, after at most `tokens` others, may be forced."""
        return bool(self.closing) or _left(self.budget, self.reasoning_tokens) <= tokens

    def forced(self) -> Sequence[int]:
        """Return the next tokens that are forced, with -1 for each free token before them."""
        if self.closing or not self._inside or self.budget is None:
            return self.closing
        return (*[-1] * (self.budget - self.reasoning_tokens), *self.format.closing)

    @property
    def _inside(self) -> bool:
        return self.header is None and self.channel == "analysis"

    @property
    def _over_budget(self) -> bool:
        return self._inside and _left(self.budget, self.reasoning_tokens) <= 0


def detect_reasoning(tokenizer: Any, template: str) -> ReasoningFormat | None:
    """Return the format that a chat template uses, if the tokenizer has a token for each mark."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    tokens = {token.content: index for index, token in added.items()}

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(answer: Sequence[int]) -> str:
        return str(tokenizer.decode(list(answer), skip_special_tokens=True))

    if tokens.keys() >= {*HARMONY} and "<|channel|>analysis" in template:
        start, channel, message, end = (tokens[mark] for mark in HARMONY)
        closing = (end, start, *encode("assistant"), channel, *encode("final"), message)
        commentary = encode("commentary")
        return HarmonyReasoning(start, channel, message, end, closing, commentary, decode)
    for begin, end_mark, label in MARKS:
        if begin in tokens and end_mark in tokens and end_mark in template:
            return MarkedReasoning(
                begin_mark=tokens[begin],
                end_mark=tokens[end_mark],
                label=encode(label) if label else (),
                repeats=bool(added[tokens[begin]].special),
                is_blank=lambda token: token not in added and not decode([token]).strip(),
            )
    return None


def effort_variables(template: str, effort: str) -> dict[str, Any]:
    """Return the variables by which a chat template knows a reasoning effort.

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


def _left(budget: int | None, used: int) -> float:
    return inf if budget is None else budget - used
