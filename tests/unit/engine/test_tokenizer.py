"""Chat templates that fail, and tool calls that special tokens mark."""

from __future__ import annotations

import json

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
