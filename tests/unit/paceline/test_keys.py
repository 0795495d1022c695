"""Every name that OpenAI's and Anthropic's own types know is accepted where it stands."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from anthropic.types import beta
from anthropic.types.beta import BetaMessage
from openai.types import chat, responses, shared_params
from openai.types.chat.chat_completion_content_part_param import File, FileFile
from openai.types.responses import response_create_params, response_input_item_param
from pydantic import BaseModel

from paceline.request.keys import KEYS
from paceline.request.wires import IGNORED_ON, Wire, read_ignored

MAKERS: list[tuple[str, list[Any]]] = [
    ("CHAT messages", [chat.ChatCompletionMessageParam, chat.ChatCompletionMessage]),
    (
        "CHAT messages.content",
        [chat.ChatCompletionContentPartParam, chat.ChatCompletionContentPartRefusalParam, File],
    ),
    ("CHAT messages.content.source", [FileFile]),
    (
        "CHAT messages.tool_calls",
        [chat.ChatCompletionMessageToolCallUnionParam, chat.ChatCompletionMessageToolCallUnion],
    ),
    ("CHAT tools", [chat.ChatCompletionToolUnionParam]),
    ("CHAT tools.function", [shared_params.FunctionDefinition]),
    ("CHAT tool_choice", [chat.ChatCompletionToolChoiceOptionParam]),
    ("CHAT stream_options", [chat.ChatCompletionStreamOptionsParam]),
    (
        "CHAT response_format",
        [shared_params.ResponseFormatJSONSchema, shared_params.ResponseFormatJSONObject],
    ),
    (
        "RESPONSES input",
        [
            responses.EasyInputMessageParam,
            response_input_item_param.Message,
            response_input_item_param.FunctionCallOutput,
            response_input_item_param.ToolSearchCall,
            responses.ResponseOutputMessageParam,
            responses.ResponseOutputMessage,
            responses.ResponseFunctionToolCallParam,
            responses.ResponseFunctionToolCallItem,
            responses.ResponseCustomToolCallParam,
            responses.ResponseCustomToolCallOutputParam,
            responses.ResponseReasoningItemParam,
            responses.ResponseToolSearchOutputItemParamParam,
        ],
    ),
    (
        "RESPONSES input.content",
        [
            responses.ResponseInputContentParam,
            responses.ResponseOutputTextParam,
            responses.ResponseOutputRefusalParam,
        ],
    ),
    (
        "RESPONSES tools",
        [
            responses.FunctionToolParam,
            responses.CustomToolParam,
            responses.NamespaceToolParam,
            responses.ToolSearchToolParam,
        ],
    ),
    ("RESPONSES tool_choice", [response_create_params.ToolChoice]),
    ("RESPONSES reasoning", [shared_params.Reasoning]),
    ("RESPONSES text", [responses.ResponseTextConfigParam]),
    ("RESPONSES text.format", [responses.ResponseFormatTextConfigParam]),
    ("RESPONSES stream_options", [response_create_params.StreamOptions]),
    ("MESSAGES messages", [beta.BetaMessageParam, BetaMessage]),
    (
        "MESSAGES messages.content",
        [
            beta.BetaTextBlockParam,
            beta.BetaImageBlockParam,
            beta.BetaRequestDocumentBlockParam,
            beta.BetaSearchResultBlockParam,
            beta.BetaThinkingBlockParam,
            beta.BetaRedactedThinkingBlockParam,
            beta.BetaToolUseBlockParam,
            beta.BetaToolResultBlockParam,
            beta.BetaToolReferenceBlockParam,
            beta.BetaTextBlock,
            beta.BetaThinkingBlock,
            beta.BetaToolUseBlock,
        ],
    ),
    (
        "MESSAGES messages.content.source",
        [
            beta.BetaBase64ImageSourceParam,
            beta.BetaURLImageSourceParam,
            beta.BetaFileImageSourceParam,
            beta.BetaPlainTextSourceParam,
            beta.BetaContentBlockSourceParam,
        ],
    ),
    ("MESSAGES tools", [beta.BetaToolParam]),
    ("MESSAGES tool_choice", [beta.BetaToolChoiceParam]),
    ("MESSAGES thinking", [beta.BetaThinkingConfigParam]),
    ("MESSAGES output_config", [beta.BetaOutputConfigParam]),
    ("MESSAGES output_config.format", [beta.BetaJSONOutputFormatParam]),
]


def names_of(kind: Any) -> Iterator[str]:
    """Yield the names of an object's type, or of each object of a union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield field.alias or name
    elif hasattr(kind, "__total__"):
        yield from kind.__annotations__
    else:
        for one in get_args(kind):
            yield from names_of(one)


@pytest.mark.parametrize(("place", "kinds"), MAKERS)
def test_each_name_of_the_makers_types_is_known(place: str, kinds: list[Any]) -> None:
    known, ignored = KEYS[place]
    assert not known & ignored
    for kind in kinds:
        names = {*names_of(kind)}
        assert names
        assert names <= known | ignored, kind


def test_each_field_of_the_makers_requests_is_known_on_its_wire() -> None:
    """Null is accepted of any name, so each has a value that no field has."""
    unserved = {"prompt", "moderation", "betas", "compaction", "mcp_servers"}
    for wire, kind in (
        (Wire.RESPONSES, response_create_params.ResponseCreateParamsBase),
        (Wire.MESSAGES, beta.message_create_params.MessageCreateParamsBase),
    ):
        for name in {*names_of(kind)} - unserved:
            assert read_ignored({name: object()}, wire) in ((), (name,))
    assert read_ignored(dict.fromkeys(IGNORED_ON[Wire.MESSAGES], 1), Wire.MESSAGES)
