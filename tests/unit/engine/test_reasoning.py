"""Reasoning is told from the answer by token ids, in every family's format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from workers.demo import CHECKPOINT
from workers.engine.reasoning import (
    ANSWERING,
    Part,
    ReasoningState,
    detect_reasoning,
    effort_variables,
    template_variables,
)

FORMATS = {
    "qwen": (("<think>", "</think>"), "{% if x %}<think>\n\n</think>{% endif %}"),
    "mistral": (("[THINK]", "[/THINK]"), "[THINK]draft[/THINK]"),
    "gemma": (("<|channel>", "<channel|>"), "<|channel>thought\n<channel|>"),
    "gpt-oss": (
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        "<|start|>assistant<|channel|>analysis<|message|>",
    ),
}


@cache
def tokenizer_of(family: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(CHECKPOINT / "tokenizer.json"))
    marks = [AddedToken(mark, special=family != "qwen") for mark in FORMATS[family][0]]
    tokenizer.add_tokens(marks, special_tokens=family != "qwen")
    return tokenizer


def encode(family: str, text: str) -> list[int]:
    return list(tokenizer_of(family)(text, add_special_tokens=False)["input_ids"])


def begin(
    family: str, prompt: str, budget: int | None = None, *, constrained: bool = False
) -> ReasoningState:
    reasoning = detect_reasoning(tokenizer_of(family), FORMATS[family][1])
    assert reasoning is not None
    return reasoning.begin(encode(family, prompt), budget, constrained=constrained)


def split(family: str, state: ReasoningState, tokens: Sequence[int]) -> tuple[str, str]:
    texts: dict[Part, list[int]] = {part: [] for part in Part}
    for token in tokens:
        part, added = state.push(token)
        texts[part] += added
    decode = tokenizer_of(family).decode
    return decode(texts[Part.REASONING]), decode(texts[Part.ANSWER])


@pytest.mark.parametrize(
    ("family", "prompt", "answer", "expected"),
    [
        ("qwen", "user: Hi\n<think>\n", "Hm.</think>Yes", ("Hm.", "Yes")),
        ("qwen", "user: Hi\n", "\n<think>Hm.</think>Yes", ("Hm.", "\nYes")),
        ("qwen", "user: Hi\n<think>\n\n</think>\n\n", "Yes", ("", "Yes")),
        ("qwen", "<think> is a tag. assistant:", "Yes", ("", "Yes")),
        ("qwen", "user: Hi\n", "Write <think>x</think>.", ("", "Write <think>x</think>.")),
        ("mistral", "user: Hi", "[THINK]Hm.[/THINK]Yes", ("Hm.", "Yes")),
        ("mistral", "user: Hi", "A[THINK]Hm.[/THINK]Yes", ("Hm.", "AYes")),
        ("gemma", "<turn>model\n", "<|channel>thought\nHm.<channel|>Yes", ("Hm.", "Yes")),
        ("gemma", "<turn>model\n<|channel>thought\n", "Hm.<channel|>Yes", ("Hm.", "Yes")),
        ("gemma", "<|channel>thought\n<channel|>", "Yes", ("", "Yes")),
        (
            "gpt-oss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Yes<|return|>",
            ("Hm.", "Yes<|return|>"),
        ),
        (
            "gpt-oss",
            "<|start|>assistant",
            "<|channel|>commentary<|message|>Let me look. <|end|><|start|>assistant"
            "<|channel|>commentary to=functions.look json<|message|>{}<|call|>",
            (
                "",
                "Let me look. <|channel|>commentary to=functions.look json<|message|>{}<|call|>",
            ),
        ),
        (
            "gpt-oss",
            "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>",
            "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            ("Hm.", "Yes"),
        ),
        (
            "gpt-oss",
            "<|start|>assistant",
            " to=functions.look<|channel|>commentary json<|message|>{}",
            ("", "<|channel|>commentary to=functions.look<|message|>{}"),
        ),
        (
            "gpt-oss",
            "<|start|>assistant",
            "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant to=functions.look"
            "<|channel|>commentary json<|message|>{}",
            ("", "Hm.<|channel|>commentary to=functions.look<|message|>{}"),
        ),
        (
            "gpt-oss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>Two.<|start|>assistant<|channel|>final<|message|>Yes",
            ("One.Two.", "Yes"),
        ),
    ],
)
def test_each_format_is_split_by_its_marks(
    family: str, prompt: str, answer: str, expected: tuple[str, str]
) -> None:
    """A prompt may open or close the reasoning; a mark that is a text counts at the start alone."""
    assert split(family, begin(family, prompt), encode(family, answer)) == expected


@pytest.mark.parametrize("family", FORMATS)
def test_the_characters_of_a_mark_are_no_mark(family: str) -> None:
    """Only the token ends the reasoning, not its spelling in several tokens."""
    state = begin(family, "")
    first, *_ = FORMATS[family][0]
    answer = "".join(letter + "\0" for letter in first).split("\0")
    tokens = [token for letter in answer if letter for token in encode(family, letter)]
    tokens = tokens if family != "gpt-oss" else [*encode(family, "final<|message|>"), *tokens]
    assert split(family, state, tokens) == ("", first)


@pytest.mark.parametrize(
    ("family", "prompt", "opening", "closing"),
    [
        ("qwen", "<think>\n", "", "</think>"),
        ("qwen", "Hi", "<think>", "</think>"),
        ("mistral", "Hi", "[THINK]", "[/THINK]"),
        ("gemma", "Hi", "<|channel>thought\n", "<channel|>"),
        (
            "gpt-oss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
    ],
)
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_forces_the_closing_tokens(
    family: str, prompt: str, opening: str, closing: str, budget: int
) -> None:
    """After exactly so many tokens only the closing mark may come, then the answer is free."""
    state = begin(family, prompt, budget)
    for token in encode(family, opening):
        assert state.next_token().forced in (None, token)
        state.push(token)
    for used in range(budget):
        left = budget - used
        assert state.next_token().forced is None
        assert state.may_force(left)
        assert not state.may_force(left - 1)
        assert [*state.forced()] == [-1] * left + encode(family, closing)
        state.push(encode(family, "a")[0])
    for token in encode(family, closing):
        assert state.may_force(0)
        assert state.next_token().forced == token == state.forced()[0]
        state.push(token)
    assert state.next_token().answering
    assert state.next_token().forced is None
    assert state.reasoning_tokens == budget


@pytest.mark.parametrize(("family", "again"), [("qwen", False), ("mistral", True)])
def test_a_budget_matters_only_where_reasoning_may_come(family: str, *, again: bool) -> None:
    """Elsewhere the decoder needs no mask, and does not wait for the drafts."""
    first, last = FORMATS[family][0]
    assert begin(family, "Hi", 2).may_force(2)
    assert not begin(family, "Hi", 2).may_force(1)
    assert begin(family, f"Hi{first}", 0).may_force(0)
    assert begin(family, f"Hi{first}{last}", 0).may_force(0) is again
    assert not begin(family, f"Hi{first}").may_force(99)
    assert begin(family, f"Hi{first}").forced() == begin(family, "Hi", 0).forced() == ()


def test_a_call_ends_the_reasoning() -> None:
    """Models begin a call without the closing mark; as reasoning, it would never be made."""
    tokens = encode("qwen", "Hm.<tool_call>{}</tool_call>")
    mark = encode("qwen", "<tool_call>")[0]
    reasoning = detect_reasoning(tokenizer_of("qwen"), FORMATS["qwen"][1])
    assert reasoning is not None
    prompt = encode("qwen", "<think>")
    state = reasoning.begin(prompt, call_mark=mark)
    assert split("qwen", state, tokens) == ("Hm.", "<tool_call>{}</tool_call>")
    assert state.next_token() == ANSWERING
    plain = reasoning.begin(prompt)
    assert split("qwen", plain, tokens) == ("Hm.<tool_call>{}</tool_call>", "")


def test_a_grammar_begins_at_the_answer() -> None:
    """A constrained answer ends its reasoning, not itself, and begins none within its form."""
    state = begin("qwen", "Hi", constrained=True)
    assert state.next_token().beginning == encode("qwen", "<think>")[0]
    for token in encode("qwen", "<think>Hm"):
        state.push(token)
        assert not state.next_token().answering
        assert not state.next_token().may_end
    state.push(encode("qwen", "</think>")[0])
    assert state.next_token() == ANSWERING
    harmony = begin("gpt-oss", "", constrained=True)
    for token in encode("gpt-oss", "<|channel|>analysis<|message|>Hm<|end|>"):
        assert harmony.next_token().forced is None
        harmony.push(token)
    for token in encode("gpt-oss", "<|start|>assistant<|channel|>final<|message|>"):
        assert harmony.next_token().forced == token
        harmony.push(token)
    assert harmony.next_token().answering


def test_a_constrained_answer_in_channels_may_end_with_a_call() -> None:
    """Nowhere else before the final message, and the grammar describes nothing before it."""
    state = begin("gpt-oss", "", constrained=True)
    assert state.forced() == ()
    for token in encode("gpt-oss", "<|channel|>analysis<|message|>Hm"):
        assert (state.next_token().answering, state.next_token().may_end) == (False, False)
        state.push(token)
    assert state.forced() == ()
    call = begin("gpt-oss", "")
    for token in encode("gpt-oss", "<|channel|>commentary to=functions.look<|message|>"):
        assert not call.next_token().may_end
        call.push(token)
    assert (call.next_token().answering, call.next_token().may_end) == (False, True)


@pytest.mark.parametrize("template", ["", "{{ messages }}", "think"])
def test_a_template_without_marks_has_no_reasoning(template: str) -> None:
    """Also if the tokenizer has the tokens: the model was not trained to use them."""
    assert re.search("</think>", template) is None
    assert all(detect_reasoning(tokenizer_of(family), template) is None for family in FORMATS)


GPT_OSS = """
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{% endif %}
Reasoning: {{ reasoning_effort }}{{ message.thinking }}"""
HY3 = """{%- if reasoning_effort not in ['high', 'low', 'no_think'] %}
{{ raise_exception('unknown reasoning_effort') }}{% endif %}"""
QWEN = "{% if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}"
DEEPSEEK = "{% if not thinking %}</think>{% elif reasoning_effort == 'max' %}Hard!{% endif %}"


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        (QWEN, "none", {"enable_thinking": False}),
        (QWEN, "minimal", {"enable_thinking": True}),
        (QWEN, "max", {"enable_thinking": True}),
        (GPT_OSS, "none", {"reasoning_effort": "low"}),
        (GPT_OSS, "minimal", {"reasoning_effort": "low"}),
        (GPT_OSS, "medium", {"reasoning_effort": "medium"}),
        (GPT_OSS, "xhigh", {"reasoning_effort": "high"}),
        (HY3, "none", {"reasoning_effort": "no_think"}),
        (HY3, "minimal", {"reasoning_effort": "low"}),
        (HY3, "medium", {"reasoning_effort": "low"}),
        (HY3, "max", {"reasoning_effort": "high"}),
        (DEEPSEEK, "none", {"thinking": False}),
        (DEEPSEEK, "low", {"thinking": True, "reasoning_effort": "low"}),
        (DEEPSEEK, "max", {"thinking": True, "reasoning_effort": "max"}),
        ("{{ messages }}", "high", {}),
    ],
)
def test_an_effort_is_what_the_template_knows_of_it(
    template: str, effort: str, variables: dict[str, Any]
) -> None:
    """Above a template's highest level is its highest; none switches off where it can."""
    assert effort_variables(template, effort) == variables


def test_the_variables_of_a_template_are_those_that_it_reads() -> None:
    """Also beside the tags that transformers adds to Jinja; a broken template reads nothing."""
    template = "{% generation %}{% if a.b %}{{ c }}{% break %}{% endif %}{% endgeneration -%}"
    assert template_variables("{% for x in y %}" + template + "{% endfor %}") == {"a", "c", "y"}
    assert template_variables("{% if %}") == set()
