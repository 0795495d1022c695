"""Chat templates that fail, and tool calls that special tokens mark."""

from __future__ import annotations

import json
from copy import copy
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from policies.request.profile import Sampling
from workers.engine.tokenizer import PromptRenderer
from workers.engine.types import Generation, InvalidGeneration, LaneName, Prompt
from workers.server.tool_calls import ToolCallSplitter, ToolFormat

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
    assert renderer.tool_parser_name == "mistral"
    splitter = ToolCallSplitter(ToolFormat("mistral", []))
    pieces = stream_answer(renderer, f"Adding ü.{written}</s>", keep_call_tokens=True)
    parts = [*(part for piece in pieces for part in splitter.feed(piece)), *splitter.close()]
    *content, call = parts
    assert "".join(map(str, content)) == "Adding ü."
    assert isinstance(call, dict)
    function = call["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("add", {"a": 3})


def test_a_call_without_an_end_mark_ends_where_the_next_begins(renderer: PromptRenderer) -> None:
    splitter = ToolCallSplitter(ToolFormat("mistral", []))
    pieces = stream_answer(
        renderer, f"{NEW_FORMAT}{NEW_FORMAT.replace('3', '4')}</s>", keep_call_tokens=True
    )
    parts = [*(part for piece in pieces for part in splitter.feed(piece)), *splitter.close()]
    arguments = [part["function"]["arguments"] for part in parts if isinstance(part, dict)]
    assert [json.loads(text) for text in arguments] == [{"a": 3}, {"a": 4}]
    assert len(parts) == 2


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
{{- id + " " -}}
{%- endif -%}
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
    of_call, of_result = with_template(renderer, CHECKS_IDS).chat(messages).split()
    assert of_call == of_result
    assert of_call.isalnum()
    assert of_call.isascii()
    assert (of_call == given) is (given == "Ab1Cd2Ef3")
    assert call["id"] == given


def test_c11_ids_stay_as_they_are_in_templates_of_others(renderer: PromptRenderer) -> None:
    messages = [{"role": "tool", "tool_call_id": "call_01", "content": "4"}]
    plain = with_template(renderer, "{{ messages[0].tool_call_id }}")
    assert plain.chat(messages) == "call_01"


def test_c11_a_template_without_end_is_an_error_of_the_request(renderer: PromptRenderer) -> None:
    """Hermes' templates never end on a parameter that may be null."""
    endless = "{%- macro read(one) -%}{{ read(one) }}{%- endmacro -%}{{ read(messages) }}"
    with pytest.raises(InvalidGeneration, match="nested too deeply for the model's chat template"):
        with_template(renderer, endless).chat([{"role": "user", "content": "x"}])
