"""What the published chat template of a family does: tool calls and reasoning, there and back.

The engine renders an answer with a thought and calls by the template, as it renders the earlier
turns of a chat, and reads the text again as it reads an answer. The tokenizer is the demo's, with
the marks of reasoning of all families as tokens of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from transformers import AddedToken, AutoTokenizer

from paceline.request.profile import Sampling
from tests.support.tool_call_text import format_name, renderer_of, round_trips, tool_of
from workers.demo import CHECKPOINT
from workers.engine.text.reasoning import (
    HARMONY,
    MARKS,
    MarkedReasoning,
    Part,
    detect_reasoning,
    template_variables,
)
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import Generation, InvalidGeneration, LaneName, Prompt

CALLS: Final = 20
_TOOL: Final = "get_weather"
_THOUGHT, _ANSWER, _RESULT, _QUESTION = "Kalkuluj", "Suno", "Rezultat", "Kwestie"
_PLAIN_MARKS: Final = MARKS[0][:2]
"""Tokens of Qwen and others that are text to their tokenizers."""


@dataclass(slots=True)
class ChatChecks:
    """What a template does, in the words of the table, and what went wrong."""

    tools: str
    reasoning: str
    problems: list[str] = field(default_factory=list)


def check_chat(name: str, template: str, calls: int = CALLS) -> ChatChecks:
    problems: list[str] = []
    tools = reasoning = "NO"
    try:
        tools = _check_tools(name, template, calls)
    except AssertionError as error:
        problems.append(f"tool calls of {name}: {str(error)[:200]}")
    try:
        reasoning = _check_reasoning(template)
    except AssertionError as error:
        problems.append(f"reasoning of {name}: {str(error)[:200]}")
    return ChatChecks(tools, reasoning, problems)


def _check_tools(name: str, template: str, calls: int) -> str:
    known = format_name(template)
    if not known:
        return "none"
    tool = tool_of(_TOOL, {"place": "Delta"})
    prompt = renderer_of(template).chat([{"role": "user", "content": _QUESTION}], [tool])
    assert _TOOL in prompt, "the tool is not in the prompt"
    count = round_trips(name, template, calls)
    listed = "" if "tools" in template_variables(template) else ", tools in a message"
    return f"`{known}`, {count} calls{listed}" if count else f"`{known}`, not written"


def _check_reasoning(template: str) -> str:
    tokenizer = copy(_tokenizer())
    tokenizer.chat_template = template
    reasoning_format = detect_reasoning(tokenizer, template)
    if reasoning_format is None:
        return "none"
    mark = HARMONY[1]
    if isinstance(reasoning_format, MarkedReasoning):
        mark = tokenizer.convert_ids_to_tokens(reasoning_format.begin_mark)
    renderer = PromptRenderer(tokenizer)
    variables = renderer.template_variables({}, "high")
    for messages, tools in _chats():
        prompt, answer = _written(renderer, messages, tools, variables)
        if _THOUGHT in answer:
            thought, rest = _split(renderer, tokenizer, prompt, answer)
            assert thought.strip() == _THOUGHT, answer
            assert _THOUGHT not in rest, answer
            assert (_TOOL if tools else _ANSWER) in rest, answer
            return f"`{mark}`, read back"
    assert isinstance(reasoning_format, MarkedReasoning), "its template writes no thought"
    prompt = renderer.chat([{"role": "user", "content": _QUESTION}], None, variables)
    begin, end, label = next(marks for marks in MARKS if marks[0] == mark)
    begun = prompt.rstrip().endswith((begin, f"{begin}{label}".rstrip()))
    answer = f"{'' if begun else begin + label}{_THOUGHT}{end}{_ANSWER}"
    thought, rest = _split(renderer, tokenizer, prompt, answer)
    assert (thought.strip(), rest.strip()) == (_THOUGHT, _ANSWER), answer
    return f"`{mark}`, split"


def _chats() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Return a chat whose answer thinks and calls, and one whose answer thinks and speaks."""
    question = {"role": "user", "content": _QUESTION}
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
    function = {"name": _TOOL, "arguments": {"place": "Delta"}}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    calls = {"role": "assistant", "content": "", "tool_calls": [call], **thought}
    result = {"role": "tool", "tool_call_id": call["id"], "name": _TOOL, "content": _RESULT}
    speaks = {"role": "assistant", "content": _ANSWER, **thought}
    return [
        ([question, calls, result], [tool_of(_TOOL, {"place": "Delta"})]),
        ([question, speaks, {"role": "user", "content": _RESULT}], []),
    ]


def _written(
    renderer: PromptRenderer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> tuple[str, str]:
    """Return the prompt of a chat, and the text in which its template renders the answer."""
    try:
        prompt = renderer.chat(messages[:1], tools or None, variables)
        whole = renderer.chat(messages, tools or None, variables)
    except InvalidGeneration:
        return "", ""
    if not whole.startswith(prompt):
        return "", ""
    return prompt, whole[len(prompt) :].partition(_RESULT)[0]


def _split(renderer: PromptRenderer, tokenizer: Any, prompt: str, answer: str) -> tuple[str, str]:
    """Return the reasoning and the rest of an answer to a prompt."""
    generation = Generation(
        request_id="check",
        lane=LaneName.VLM,
        prompt=Prompt(),
        sampling=Sampling(),
        split_reasoning=True,
    )
    reasoning = renderer.reasoning(generation, renderer.prepare(Prompt(text=prompt)).tokens)
    assert reasoning is not None
    parts: dict[Part, list[int]] = {part: [] for part in Part}
    for token in tokenizer(answer, add_special_tokens=False)["input_ids"]:
        part, tokens = reasoning.state.push(token)
        parts[part] += tokens
    return renderer.spell(parts[Part.REASONING]), renderer.spell(parts[Part.ANSWER])


@cache
def _tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(CHECKPOINT))
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    marks = dict.fromkeys([*HARMONY, *(mark for begin, end, _ in MARKS for mark in (begin, end))])
    added = [AddedToken(mark, special=mark not in _PLAIN_MARKS) for mark in marks]
    tokenizer.add_tokens(added)
    return tokenizer
