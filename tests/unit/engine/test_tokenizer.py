"""Chat templates that fail, and tool calls that special tokens mark."""

import json
import re
from ast import literal_eval
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.request.profile import Sampling
from tests.support.tool_call_text import read_calls, renderer_of
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.text.tool_formats import FORMATS
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
    special = ("[TOOL_CALLS]", "[ARGS]", "[IMG]", "</s>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    return PromptRenderer(fast)


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


@pytest.mark.parametrize(
    ("written", "content", "calls"),
    [
        (f"Adding ü.{OLD_FORMAT}", "Adding ü.", [("add", '{"a": 3}')]),
        (f"Adding ü.{NEW_FORMAT}", "Adding ü.", [("add", '{"a": 3}')]),
        (NEW_FORMAT * 2, "", [("add", '{"a": 3}')] * 2),  # the second ends the first
    ],
)
def test_a_tool_call_marked_by_special_tokens_is_parsed(renderer, written, content, calls) -> None:
    assert renderer.tool_format is FORMATS["mistral"]
    pieces = stream_answer(renderer, f"{written}</s>", keep_call_tokens=True)
    assert read_calls(FORMATS["mistral"], pieces)[:2] == (content, calls)


def call_of(name: str, call_id: str = "a", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "Well.", "tool_calls": [call_of("add", a=3)]},
    {"role": "tool", "tool_call_id": "a", "name": "add", "content": "5"},
    {"role": "tool", "tool_call_id": "b", "content": "6"},
    {"role": "user", "content": "And?"},
]
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
DESCRIBED = 'You can use these functions:\n{"name": "add", "parameters": {}}'
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
SYSTEM = {"role": "system", "content": "Be brief."}
TAKES_NO_SYSTEM = (
    "{% if messages | selectattr('role', 'eq', 'system') | list %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, HISTORY[:1], f"system: {DESCRIBED};user: Add.;"),
        (PLAIN, [SYSTEM, *HISTORY[:1]], f"system: Be brief.\n\n{DESCRIBED};user: Add.;"),
        (TAKES_NO_SYSTEM + PLAIN, HISTORY[:1], f"user: {DESCRIBED}\n\nAdd.;"),
    ],
)
def test_a_template_without_tools_gets_them_in_the_first_message(
    template: str, messages: list[Any], expected: str
) -> None:
    assert renderer_of(template).chat(messages, [ADD]) == expected


def test_a_template_without_calls_has_them_and_their_results_in_text() -> None:
    """Of two results and the question after them one message is left: roles alternate."""
    plain = "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }};{% endfor %}"
    text = renderer_of(plain).chat(HISTORY)
    assert text == (
        'user: Add.;assistant: Well.\n[{"name": "add", "arguments": {"a": 3}}];'
        "user: Result of add: 5\nResult of the function: 6\nAnd?;"
    )
    with_results = renderer_of(PLAIN).chat(HISTORY)
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
def test_a_template_gets_arguments_as_it_reads_them(written: str, expected: str) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        f"{written}{{% endfor %}}{{{{ m.content }}}}{{% endfor %}}"
    )
    assert expected in renderer_of(template).chat(HISTORY)


# Of microsoft/Phi-4-mini-instruct.
PHI4 = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + "
    "message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)


def test_tools_of_phi_4_are_a_field_of_the_system_message() -> None:
    phi4 = renderer_of(PHI4)
    assert phi4.tool_format is FORMATS["phi4"]
    text = phi4.chat(HISTORY[:3], [ADD])
    assert text.startswith('<|system|><|tool|>[{"name": "add", "parameters": {}}]<|/tool|><|end|>')
    call = '<|tool_call|>[{"name": "add", "arguments": {"a": 3}}]<|/tool_call|>'
    assert f"<|assistant|>Well.\n{call}<|end|>" in text
    assert read_calls(phi4.tool_format, call).calls == [("add", '{"a": 3}')]


# DeepSeek's templates render calls, and describe neither them nor tools.
DEEPSEEK = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}{% endfor %}"
)


def test_a_model_learns_its_format_of_calls_from_the_rendering_of_one() -> None:
    deepseek = renderer_of(DEEPSEEK)
    assert deepseek.tool_format is not None
    text = deepseek.chat(HISTORY[:1], [ADD])
    assert read_calls(deepseek.tool_format, text).calls == [("Bravo", '{"Charlie": "Delta"}')]


@pytest.mark.parametrize(
    ("with_tools", "text"), [(True, f"One{NEW_FORMAT}"), (False, 'Oneadd{"a": 3}')]
)
def test_special_tokens_outside_tool_calls_are_no_text(renderer, with_tools, text) -> None:
    written = f"[IMG]One{NEW_FORMAT}</s>"
    assert "".join(stream_answer(renderer, written, keep_call_tokens=with_tools)) == text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ '// ' + tools[0].function.description }}", "these messages."),
        ("{{ messages[0].content.missing.more }}", "these messages: "),
        ("{% for name in messages[0].content | items %}{% endfor %}", "these messages"),
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate."),
        # Hermes' templates never end on a parameter that may be null.
        (
            "{%- macro read(one) -%}{{ read(one) }}{%- endmacro -%}{{ read(messages) }}",
            "nested too deeply for the model's chat template",
        ),
    ],
)
def test_c11_an_error_of_a_template_is_an_error_of_the_request(template: str, reason: str) -> None:
    with pytest.raises(InvalidGeneration, match=reason) as invalid:
        renderer_of(template).chat(HISTORY[:1], [{"function": {"description": 5}}])
    assert invalid.value.param == "messages"


# As templates of gpt-oss, Command R and Hermes read tools.
READS_TOOLS = """{%- set function = tools[0].function -%}
{{- "// " + function.description + "|" -}}
{%- for name, schema in function.parameters.properties.items() -%}{{- name -}}{%- endfor -%}
{{- "|" + function.parameters.type + "|" + function | tojson -}}"""
COMPLETE: dict[str, Any] = {"name": "add", "description": "Adds"}
COMPLETE |= {"parameters": {"properties": {"a": {}}, "type": "object"}}


@pytest.mark.parametrize(
    "function",
    [
        {"name": "add"},
        {"name": "add", "description": None, "parameters": None, "strict": None},
        {"name": "add", "parameters": {}},
    ],
)
def test_c11_a_tool_without_its_optional_fields_renders(function: dict[str, Any]) -> None:
    reading = renderer_of(READS_TOOLS)
    assert reading.chat(HISTORY[:1], [{"function": function}]).startswith("// ||object|{")
    complete = reading.chat(HISTORY[:1], [{"function": COMPLETE}])
    assert complete == f"// Adds|a|object|{json.dumps(COMPLETE)}", "as its client wrote it"


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
def test_c11_ids_of_tool_calls_fit_templates_of_mistral(given: str) -> None:
    call = call_of("add", given)
    messages: list[dict[str, Any]] = [
        *HISTORY[:1],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": given, "content": "4"},
    ]
    text = renderer_of(CHECKS_IDS).chat(messages)
    of_call, of_result = re.findall(r"id=(\S+)", text)
    assert of_call == of_result
    assert of_call.isalnum()
    assert of_call.isascii()
    assert (of_call == given) is (given == "Ab1Cd2Ef3")
    assert call["id"] == given
    others = renderer_of("{% for m in messages %}{{ m.tool_call_id }}{% endfor %}")
    assert others.chat(messages[2:]) == given


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
def test_messages_come_as_the_template_takes_them(messages, expected) -> None:
    """As Gemma 2's template takes no system message, and Mistral's demand that roles alternate."""
    alternating = renderer_of(TAKES_NO_SYSTEM + ALTERNATES)
    text = alternating.chat(messages)
    assert text == expected
    assert alternating.turn_end(text, messages) == len(text)
    answer: dict[str, Any] = {"role": "assistant", "content": "x"}
    assert alternating.chat([*messages, answer, *HISTORY[:1]]).startswith(text)


def test_parallel_calls_come_one_by_one_where_the_template_takes_one() -> None:
    """As Llama 3's does; a forced answer of such a model may have several."""
    refusing = "{% if (m.tool_calls or [])[1] is defined %}{{ raise_exception('One.') }}{% endif %}"
    template = ALTERNATES.replace("{{ m.role }}:", refusing + "{{ m.role }}:")
    calls = [call_of(name, name) for name in "abc"]
    messages: list[dict[str, Any]] = [
        *HISTORY[:1],
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    text = renderer_of(template).chat(messages)
    assert text == "user: Add.;assistant: Well.a{};tool: 1;assistant: b{};tool: 2;assistant: c{};"
    assert "a{}b{}c{}" in renderer_of(ALTERNATES).chat(messages)


def test_a_picture_and_a_system_message_are_parts_of_one_turn() -> None:
    """But no part of a result where the template takes no user behind one."""
    parts = [{"type": "text", "text": "What is this?"}, PICTURE]
    given: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": parts}]
    text = renderer_of(TAKES_NO_SYSTEM + ALTERNATES).chat(given)
    kinds = [part["type"] for part in literal_eval(text.removeprefix("user: ").rstrip(";"))]
    assert kinds == ["text", "text", "text", "image"]
    text = renderer_of(ALTERNATES).chat([*HISTORY[:-1], {"role": "user", "content": [PICTURE]}])
    assert text.endswith("tool: 6;assistant: ;user: [{'type': 'image'}];")


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_an_answer_goes_on_within_the_last_message_or_behind_it() -> None:
    """A prefill ends where its client ends it, and no end mark stands behind it."""
    renderer = renderer_of(CHATML)
    messages = [{"role": "user", "content": "Sing"}, {"role": "assistant", "content": "La la "}]
    closed = "<|user|>Sing<|end|><|assistant|>La la <|end|>"
    assert renderer.chat(messages) == f"{closed}<|assistant|>"
    assert renderer.chat(messages, add_generation_prompt=False) == closed
    ending: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert renderer.chat(messages, **ending) == closed.removesuffix("<|end|>")
    said = {"role": "assistant", "content": [{"type": "text", "text": "La"}]}
    assert renderer.chat([messages[0], said], **ending).endswith("<|assistant|>La")
    with pytest.raises(InvalidGeneration, match="cannot go on") as refused:
        renderer_of("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}").chat(
            messages, **ending
        )
    assert refused.value.param == "continue_final_message"
