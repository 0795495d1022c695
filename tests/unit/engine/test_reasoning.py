"""Reasoning is told from the answer by token ids, in every family's format."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from workers.demo import CHECKPOINT
from workers.engine.text.reasoning import (
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


def said(channel: str, text: str) -> str:
    return f"<|channel|>{channel}<|message|>{text}"


ASSISTANT = "<|start|>assistant"
LOOK = "commentary to=functions.look json"
HM, YES = said("analysis", "Hm."), ASSISTANT + said("final", "Yes")


@cache
def tokenizer_of(family: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(CHECKPOINT / "tokenizer.json"))
    marks = [AddedToken(mark, special=family != "qwen") for mark in FORMATS[family][0]]
    tokenizer.add_tokens(marks, special_tokens=family != "qwen")
    return tokenizer


def encode(family: str, text: str) -> list[int]:
    return list(tokenizer_of(family)(text, add_special_tokens=False)["input_ids"])


def begin(family: str, prompt: str, budget: int | None = None, **options: Any) -> ReasoningState:
    reasoning = detect_reasoning(tokenizer_of(family), FORMATS[family][1])
    assert reasoning is not None
    return reasoning.begin(encode(family, prompt), budget, **options)


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
        ("gpt-oss", ASSISTANT, f"{HM}<|end|>{YES}<|return|>", ("Hm.", "Yes<|return|>")),
        (
            "gpt-oss",
            ASSISTANT,
            f"{said('commentary', 'Let me look. ')}<|end|>{ASSISTANT}{said(LOOK, '{}')}<|call|>",
            ("", f"Let me look. {said(LOOK, '{}')}<|call|>"),
        ),
        (
            "gpt-oss",
            f"<|start|>user<|message|>Hi<|end|>{ASSISTANT}<|channel|>analysis<|message|>",
            f"Hm.<|end|>{YES}",
            ("Hm.", "Yes"),
        ),
        (
            "gpt-oss",
            ASSISTANT,
            f" to=functions.look{said('commentary json', '{}')}",
            ("", said("commentary to=functions.look", "{}")),
        ),
        (
            "gpt-oss",
            ASSISTANT,
            f"{said('commentary', 'Hm.')}<|end|>{ASSISTANT} to=functions.look"
            f"{said('commentary json', '{}')}",
            ("", f"Hm.{said('commentary to=functions.look', '{}')}"),
        ),
        ("gpt-oss", ASSISTANT, f"{HM}<|end|>{ASSISTANT}{HM}{YES}", ("Hm.Hm.", "Yes")),
    ],
)
def test_each_format_is_split_by_its_marks(family, prompt, answer, expected) -> None:
    """A prompt may open or close the reasoning; a mark that is a text counts at the start alone."""
    assert split(family, begin(family, prompt), encode(family, answer)) == expected


@pytest.mark.parametrize("family", FORMATS)
def test_the_characters_of_a_mark_are_no_mark(family: str) -> None:
    """Only the token ends the reasoning, not its spelling in several tokens."""
    first, *_ = FORMATS[family][0]
    opening = encode(family, "final<|message|>" if family == "gpt-oss" else "")
    letters = [token for letter in first for token in encode(family, letter)]
    assert split(family, begin(family, ""), [*opening, *letters]) == ("", first)


@pytest.mark.parametrize(
    ("family", "prompt", "opening", "closing"),
    [
        ("qwen", "<think>\n", "", "</think>"),
        ("qwen", "Hi", "<think>", "</think>"),
        ("mistral", "Hi", "[THINK]", "[/THINK]"),
        ("gemma", "Hi", "<|channel>thought\n", "<channel|>"),
        ("gpt-oss", ASSISTANT, said("analysis", ""), f"<|end|>{ASSISTANT}{said('final', '')}"),
    ],
)
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_forces_the_closing_tokens(family, prompt, opening, closing, budget) -> None:
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
    state = begin("qwen", "<think>", call_mark=encode("qwen", "<tool_call>")[0])
    assert split("qwen", state, tokens) == ("Hm.", "<tool_call>{}</tool_call>")
    assert state.next_token() == ANSWERING
    plain = begin("qwen", "<think>")
    assert split("qwen", plain, tokens) == ("Hm.<tool_call>{}</tool_call>", "")


def test_a_grammar_begins_at_the_answer() -> None:
    """A constrained answer ends its reasoning, not itself, and begins none within its form."""
    state = begin("qwen", "Hi", constrained=True)
    assert state.next_token().beginning == encode("qwen", "<think>")[0]
    for token in encode("qwen", "<think>Hm"):
        state.push(token)
        assert (state.next_token().answering, state.next_token().may_end) == (False, False)
    state.push(encode("qwen", "</think>")[0])
    assert state.next_token() == ANSWERING


def test_a_constrained_answer_in_channels_begins_in_the_final_one_or_ends_with_a_call() -> None:
    """Nowhere else before the final message, and the grammar describes nothing before it."""
    state = begin("gpt-oss", "", constrained=True)
    assert state.forced() == ()
    for token in encode("gpt-oss", f"{said('analysis', 'Hm')}<|end|>"):
        assert (state.next_token().answering, state.next_token().may_end) == (False, False)
        assert state.next_token().forced is None
        state.push(token)
    for token in encode("gpt-oss", ASSISTANT + said("final", "")):
        assert state.next_token().forced == token
        state.push(token)
    assert state.next_token().answering
    call = begin("gpt-oss", "")
    for token in encode("gpt-oss", said("commentary to=functions.look", "")):
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
def test_an_effort_is_what_the_template_knows_of_it(template, effort, variables) -> None:
    """Above a template's highest level is its highest; none switches off where it can."""
    assert effort_variables(template, effort) == variables


def test_the_variables_of_a_template_are_those_that_it_reads() -> None:
    """Also beside the tags that transformers adds to Jinja; a broken template reads nothing."""
    template = "{% generation %}{% if a.b %}{{ c }}{% break %}{% endif %}{% endgeneration -%}"
    assert template_variables("{% for x in y %}" + template + "{% endfor %}") == {"a", "c", "y"}
    assert template_variables("{% if %}") == set()
