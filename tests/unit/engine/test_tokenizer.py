"""Chat templates that fail, and tool calls that special tokens mark."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from copy import copy
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from policies.request.profile import Sampling
from tests.support.tool_call_text import read_calls
from workers.engine.tokenizer import PromptRenderer
from workers.engine.tool_formats import FORMATS
from workers.engine.types import Generation, InvalidGeneration, LaneName, Prompt

# mlx-vlm recognizes Mistral's template by the token that opens a call.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}[TOOL_CALLS]"
OLD_FORMAT = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3}}]'
NEW_FORMAT = '[TOOL_CALLS]add[ARGS]{"a": 3}'


@pytest.fixture(scope="module")
def renderer() -> PromptRenderer:
    """Return a renderer with one token per byte and four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("[TOOL_CALLS]", "[ARGS]", "[IMG]", "</s>")]
    )
    return PromptRenderer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    )


def stream_answer(renderer: PromptRenderer, written: str, *, keep_call_tokens: bool) -> list[str]:
    """Push an answer token by token; return its text in pieces."""
    generation = Generation(
        request_id="test",
        lane=LaneName.VLM,
        prompt=Prompt(text=""),
        sampling=Sampling(),
        keep_call_tokens=keep_call_tokens,
    )
    text = renderer.stream(generation)
    tokens = renderer.prepare(Prompt(text=written)).tokens
    return [*(text.push(token) for token in tokens), text.flush()]


@pytest.mark.parametrize("written", [OLD_FORMAT, NEW_FORMAT])
def test_a_tool_call_marked_by_special_tokens_is_parsed(
    renderer: PromptRenderer, written: str
) -> None:
    assert renderer.tool_format is FORMATS["mistral"]
    pieces = stream_answer(renderer, f"Adding ü.{written}</s>", keep_call_tokens=True)
    read = read_calls(FORMATS["mistral"], pieces)
    assert (read.content, read.calls) == ("Adding ü.", [("add", '{"a": 3}')])


def test_a_call_without_an_end_mark_ends_where_the_next_begins(renderer: PromptRenderer) -> None:
    pieces = stream_answer(
        renderer, f"{NEW_FORMAT}{NEW_FORMAT.replace('3', '4')}</s>", keep_call_tokens=True
    )
    read = read_calls(FORMATS["mistral"], pieces)
    assert (read.content, read.calls) == ("", [("add", '{"a": 3}'), ("add", '{"a": 4}')])


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_template_without_tools_gets_them_in_the_system_message(system: list[Any]) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=template
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    messages = [*system, {"role": "user", "content": "Hi"}]
    text = PromptRenderer(tokenizer).chat(messages, [tool])
    before = "Be brief.\n\n" if system else ""
    described = 'You can use these functions:\n{"name": "add", "parameters": {}}'
    assert text == f"system: {before}{described};user: Hi;"


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Add."},
    {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "name": "add", "content": "5"},
    {"role": "tool", "tool_call_id": "b", "content": "6"},
    {"role": "user", "content": "And?"},
]
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_a_template_that_takes_no_system_message_gets_tools_in_the_first_message(
    renderer: PromptRenderer,
) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('No.') }}{% endif %}"
    text = with_template(renderer, refusing + PLAIN).chat(HISTORY[:1], [ADD])
    described = 'You can use these functions:\n{"name": "add", "parameters": {}}'
    assert text == f"user: {described}\n\nAdd.;"


def test_a_template_without_calls_has_them_and_their_results_in_text(
    renderer: PromptRenderer,
) -> None:
    """Of two results and the question after them one message is left: roles alternate."""
    plain = "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }};{% endfor %}"
    text = with_template(renderer, plain).chat(HISTORY)
    assert text == (
        'user: Add.;assistant: Well.\n[{"name": "add", "arguments": {"a": 3}}];'
        "user: Result of add: 5\nResult of the function: 6\nAnd?;"
    )
    with_results = with_template(renderer, PLAIN).chat(HISTORY)
    assert with_results.endswith("tool: 5;tool: 6;user: And?;")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ c.function.name + c.function.arguments }}", 'add{"a": 3}'),
        ("{{ c.function.name }}{{ c.function.arguments }}", 'add{"a": 3}'),
        ("{{ c.function.name }}{{ c.function.arguments | tojson }}", 'add{"a": 3}'),
        ("{{ c.function.name }}{{ c.function.arguments | items | first | join }}", "adda3"),
    ],
)
def test_a_template_gets_arguments_as_the_text_or_the_mapping_that_it_reads(
    renderer: PromptRenderer, written: str, expected: str
) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        f"{written}{{% endfor %}}{{{{ m.content }}}}{{% endfor %}}"
    )
    assert expected in with_template(renderer, template).chat(HISTORY)


# Of microsoft/Phi-4-mini-instruct.
PHI4 = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + "
    "message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)


def test_tools_of_phi_4_are_a_field_of_the_system_message(renderer: PromptRenderer) -> None:
    phi4 = with_template(renderer, PHI4)
    assert phi4.tool_format is FORMATS["phi4"]
    text = phi4.chat(HISTORY[:3], [ADD])
    assert text.startswith('<|system|><|tool|>[{"name": "add", "parameters": {}}]<|/tool|><|end|>')
    call = '<|tool_call|>[{"name": "add", "arguments": {"a": 3}}]<|/tool_call|>'
    assert f"<|assistant|>Well.\n{call}<|end|>" in text
    assert read_calls(phi4.tool_format, call).calls == [("add", '{"a": 3}')]


def test_a_model_learns_its_format_of_calls_from_the_rendering_of_one(
    renderer: PromptRenderer,
) -> None:
    """DeepSeek's templates render calls, and describe neither them nor tools."""
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}{% endfor %}"
    )
    deepseek = with_template(renderer, template)
    assert deepseek.tool_format is not None
    text = deepseek.chat(HISTORY[:1], [ADD])
    assert read_calls(deepseek.tool_format, text).calls == [("Bravo", '{"Charlie": "Delta"}')]


def test_special_tokens_outside_tool_calls_are_no_text(renderer: PromptRenderer) -> None:
    pieces = stream_answer(renderer, f"[IMG]One{NEW_FORMAT}</s>", keep_call_tokens=True)
    assert "".join(pieces) == f"One{NEW_FORMAT}"


def test_without_tools_no_special_token_is_text(renderer: PromptRenderer) -> None:
    pieces = stream_answer(renderer, f"[IMG]One{NEW_FORMAT}</s>", keep_call_tokens=False)
    assert "".join(pieces) == 'Oneadd{"a": 3}'


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ '// ' + tools[0].function.description }}", "these messages."),
        ("{{ messages[0].content.missing.more }}", "these messages: "),
        ("{% for name in messages[0].content | items %}{% endfor %}", "these messages"),
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate."),
    ],
)
def test_c11_an_error_of_the_template_is_an_error_of_the_request(
    renderer: PromptRenderer, template: str, reason: str
) -> None:
    failing = PromptRenderer(renderer._templated)
    failing._templated.chat_template = template
    try:
        with pytest.raises(InvalidGeneration, match=reason) as invalid:
            failing.chat([{"role": "user", "content": "x"}], [{"function": {"description": 5}}])
        assert invalid.value.param == "messages"
    finally:
        failing._templated.chat_template = TEMPLATE


def with_template(renderer: PromptRenderer, template: str) -> PromptRenderer:
    tokenizer = copy(renderer._templated)
    tokenizer.chat_template = template
    return PromptRenderer(tokenizer)


# As templates of gpt-oss, Command R and Hermes read tools.
READS_TOOLS = """{%- set function = tools[0].function -%}
{{- "// " + function.description + "|" -}}
{%- for name, schema in function.parameters.properties.items() -%}{{- name -}}{%- endfor -%}
{{- "|" + function.parameters.type + "|" + function | tojson -}}"""
COMPLETE = {
    "name": "add",
    "description": "Adds",
    "parameters": {"properties": {"a": {}}, "type": "object"},
}


@pytest.mark.parametrize(
    "function",
    [
        {"name": "add"},
        {"name": "add", "description": None, "parameters": None, "strict": None},
        {"name": "add", "parameters": {}},
    ],
)
def test_c11_a_tool_without_its_optional_fields_renders(
    renderer: PromptRenderer, function: dict[str, Any]
) -> None:
    reading = with_template(renderer, READS_TOOLS)
    text = reading.chat([{"role": "user", "content": "x"}], [{"function": function}])
    assert text.startswith("// ||object|{")


def test_c11_a_complete_tool_renders_as_its_client_wrote_it(renderer: PromptRenderer) -> None:
    reading = with_template(renderer, READS_TOOLS)
    text = reading.chat([{"role": "user", "content": "x"}], [{"function": COMPLETE}])
    assert text == f"// Adds|a|object|{json.dumps(COMPLETE)}"


# Mistral's templates check every id; mlx-vlm recognizes them by the token.
CHECKS_IDS = """{%- for message in messages -%}
{%- set id = message.tool_calls[0].id if message.tool_calls else message.tool_call_id -%}
{%- if id is defined -%}
{%- if id | length != 9 -%}{{- raise_exception("Nine letters!") -}}{%- endif -%}
{{- " id=" + id + " " -}}
{%- endif -%}
{%- if message.tool_calls is defined -%}{{- message.tool_calls[0].function -}}{%- endif -%}
{{- message.content -}}
{%- endfor -%}{#- [TOOL_CALLS] -#}"""


@pytest.mark.parametrize("given", ["call_0123456789abcdef01234567", "Ab1Cd2Ef3", "é"])
def test_c11_ids_of_tool_calls_fit_templates_of_mistral(
    renderer: PromptRenderer, given: str
) -> None:
    call = {"id": given, "type": "function", "function": {"name": "add", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": given, "content": "4"},
    ]
    text = with_template(renderer, CHECKS_IDS).chat(messages)
    of_call, of_result = re.findall(r"id=(\S+)", text)
    assert of_call == of_result
    assert of_call.isalnum()
    assert of_call.isascii()
    assert (of_call == given) is (given == "Ab1Cd2Ef3")
    assert call["id"] == given


def test_c11_ids_stay_as_they_are_in_templates_of_others(renderer: PromptRenderer) -> None:
    messages = [{"role": "tool", "tool_call_id": "call_01", "content": "4"}]
    plain = with_template(
        renderer, "{% for m in messages %}{{ m.tool_call_id }} {{ m.content }}{% endfor %}"
    )
    assert plain.chat(messages) == "call_01 4"


def test_c11_a_template_without_end_is_an_error_of_the_request(renderer: PromptRenderer) -> None:
    """Hermes' templates never end on a parameter that may be null."""
    endless = "{%- macro read(one) -%}{{ read(one) }}{%- endmacro -%}{{ read(messages) }}"
    with pytest.raises(InvalidGeneration, match="nested too deeply for the model's chat template"):
        with_template(renderer, endless).chat([{"role": "user", "content": "x"}])


ALTERNATES = """{%- set turn = namespace(users=true) -%}
{%- for m in messages -%}
{%- if m.role == 'user' or m.role == 'assistant' and not m.tool_calls -%}
{%- if (m.role == 'user') != turn.users -%}{{ raise_exception('No.') }}{%- endif -%}
{%- set turn.users = not turn.users -%}
{%- endif -%}
{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] -%}{{ c.function.name }}{{ c.function.arguments | tojson }}
{%- endfor -%};
{%- endfor -%}"""
TAKES_NO_SYSTEM = (
    "{% if messages | selectattr('role', 'eq', 'system') | list %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, *HISTORY[:1]], "user: Be brief.\n\nAdd.;"),
        ([SYSTEM], "user: Be brief.;"),
        (
            [*HISTORY[:1], {"role": "assistant", "content": "5"}, SYSTEM],
            "user: Add.;assistant: 5;user: Be brief.;",
        ),
        ([*HISTORY[:1], SYSTEM], "user: Add.\n\nBe brief.;"),
        ([*HISTORY[:1], *HISTORY[:1]], "user: Add.\n\nAdd.;"),
        (HISTORY, 'user: Add.;assistant: Well.add{"a": 3};tool: 5;tool: 6\n\nAnd?;'),
    ],
)
def test_messages_come_in_an_order_that_the_template_takes(
    renderer: PromptRenderer, messages: list[dict[str, Any]], expected: str
) -> None:
    """As Gemma 2's template takes no system message, and Mistral's demand that roles alternate."""
    alternating = with_template(renderer, TAKES_NO_SYSTEM + ALTERNATES)
    text = alternating.chat(messages)
    assert text == expected
    end = alternating.turn_end(text, messages)
    answer: list[dict[str, Any]] = [{"role": "assistant", "content": "x"}]
    assert alternating.chat([*messages, *answer, *HISTORY[:1]]).startswith(text)
    assert end == len(text)


def test_parallel_calls_come_one_by_one_where_the_template_takes_one(
    renderer: PromptRenderer,
) -> None:
    """As Llama 3's does; a forced answer of such a model may have several."""
    refusing = "{% if (m.tool_calls or [])[1] is defined %}{{ raise_exception('One.') }}{% endif %}"
    template = ALTERNATES.replace("{{ m.role }}:", refusing + "{{ m.role }}:")
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}
        for name in "abc"
    ]
    messages: list[dict[str, Any]] = [
        *HISTORY[:1],
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    text = with_template(renderer, template).chat(messages)
    assert text == "user: Add.;assistant: Well.a{};tool: 1;assistant: b{};tool: 2;assistant: c{};"
    assert "a{}b{}c{}" in with_template(renderer, ALTERNATES).chat(messages)


def test_a_picture_and_a_system_message_are_parts_of_one_turn(renderer: PromptRenderer) -> None:
    parts = [{"type": "text", "text": "What is this?"}, PICTURE]
    given: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": parts}]
    text = with_template(renderer, TAKES_NO_SYSTEM + ALTERNATES).chat(given)
    kinds = [part["type"] for part in literal_eval(text.removeprefix("user: ").rstrip(";"))]
    assert kinds == ["text", "text", "text", "image"]


def test_an_answer_stands_between_a_result_and_a_picture(renderer: PromptRenderer) -> None:
    """A picture becomes no part of a result where the template takes no user behind one."""
    given = [*HISTORY[:-1], {"role": "user", "content": [PICTURE]}]
    text = with_template(renderer, ALTERNATES).chat(given)
    assert text.endswith("tool: 6;assistant: ;user: [{'type': 'image'}];")


def test_messages_stay_as_they_are_where_the_template_takes_them(renderer: PromptRenderer) -> None:
    text = with_template(renderer, PLAIN).chat([SYSTEM, *HISTORY[:1], SYSTEM, *HISTORY[:1]])
    assert text == "system: Be brief.;user: Add.;system: Be brief.;user: Add.;"


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_an_answer_goes_on_within_the_last_message_or_behind_it(renderer: PromptRenderer) -> None:
    """A prefill ends where its client ends it, and no end mark stands behind it."""
    renderer = with_template(renderer, CHATML)
    messages = [{"role": "user", "content": "Sing"}, {"role": "assistant", "content": "La la "}]
    closed = "<|user|>Sing<|end|><|assistant|>La la <|end|>"
    assert renderer.chat(messages) == f"{closed}<|assistant|>"
    assert renderer.chat(messages, add_generation_prompt=False) == closed
    ending: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert renderer.chat(messages, **ending) == closed.removesuffix("<|end|>")
    said = {"role": "assistant", "content": [{"type": "text", "text": "La"}]}
    assert renderer.chat([messages[0], said], **ending).endswith("<|assistant|>La")


def test_a_template_that_cannot_go_on_refuses_by_the_name_of_the_field(
    renderer: PromptRenderer,
) -> None:
    renderer = with_template(renderer, "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "Sing"}, {"role": "assistant", "content": "La"}]
    with pytest.raises(InvalidGeneration, match="cannot go on") as refused:
        renderer.chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert refused.value.param == "continue_final_message"
