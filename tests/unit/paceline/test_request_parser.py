"""The fields of a request: accepted values, rejected values and the parameter of an error."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.request.content import PICTURES_LIMIT
from paceline.request.fields import FieldError
from paceline.request.parser import read_profile
from paceline.request.profile import Endpoint
from tests.support.chat_bodies import (
    PICTURE,
    TOOL,
    make_tool,
    nested_json,
    read_chat,
    read_content_parts,
)
from tests.support.images import data_url, png_header

LARK: dict[str, Any] = {"syntax": "lark", "definition": 'start: "a"'}
FORM = {"type": "json_schema"}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
WRITE = {"type": "function", "function": {"name": "write", "parameters": TEXT}}


@pytest.mark.parametrize(
    "field",
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty n "
    "stop logit_bias logprobs max_tokens max_completion_tokens tools response_format stream "
    "stream_options draft_tokens specprefill specprefill_keep_pct thinking_budget reasoning_effort "
    "chat_template_kwargs tool_grammars user".split(),
)
def test_an_explicit_null_counts_as_absent(field: str) -> None:
    assert read_chat(**{field: None}) == read_chat()


def kwargs(**values: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": values}


INVALID: dict[str, tuple[Any, ...]] = {
    "model": (None, ""),
    "temperature": (-0.1, 2.1, True, float("nan"), 10**400),
    "top_p": (0, 1.1),
    "top_k": (-2, 1.5, 2**31),
    "min_p": (2,),
    "seed": (2**63,),
    "presence_penalty": (3,),
    "frequency_penalty": (-3,),
    "repetition_penalty": (0,),
    "logit_bias": (
        *([1], {"x": 1}, {"9" * 5000: 1}, {"٣": 1}, {str(i): 1 for i in range(1025)}),
        *({"5": bias} for bias in (100.5, -100.5, float("nan"))),
    ),
    "max_tokens": (0, 2**31),
    "n": (17,),
    "stop": ([1], "", ["x"] * 17, "x" * 513),
    "stream": (1,),
    "stream_options": ({},),
    "logprobs": (3,),
    "top_logprobs": (3,),
    "tools": ({}, [TOOL] * 129),
    "tool_grammars": ([], {"write": LARK}),
    "response_format": (FORM | {"json_schema": nested_json(32)},),
    "guided_json": (nested_json(33),),
    "guided_regex": ("x" * 65537,),
    "chat_template_kwargs": (
        *([], {f"x{i}": 1 for i in range(33)}, {"x": "x" * 65537}, {"x": nested_json(32)}),
    ),
    "reasoning_effort": ("most", ["low"]),
    "thinking_budget": (-1,),
    "draft_tokens": (9,),
    "specprefill": (1,),
    "specprefill_keep_pct": (0, 1.1, True),
    "messages": ("Hi", []),
    "prompt": ("x",),
    "api_base": ("http://x",),
    "extra_body": ({},),
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: value}, name) for name, values in INVALID.items() for value in values),
        *(
            ({"tools": [{"function": {"name": "a", name: 5}}]}, f"tools[0].function.{name}")
            for name in ("description", "parameters")
        ),
        *(
            ({"messages": [{"role": "user", "content": "", name: 5}]}, f"messages[0].{name}")
            for name in ("name", "tool_call_id", "reasoning_content", "reasoning")
        ),
        *(
            ({"response_format": form}, "response_format.type")
            for form in ("json", {"type": ["json_object"]})
        ),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [TOOL], "tool_grammars": {"f": LARK}}, "tool_grammars.f"),
        *(
            ({"tools": [WRITE], "tool_grammars": {"write": grammar}}, f"tool_grammars.write{field}")
            for grammar, field in (
                ("lark", ".syntax"),
                ({**LARK, "syntax": "ebnf"}, ".syntax"),
                ({**LARK, "more": 1}, ".syntax"),
                ({**LARK, "definition": ""}, ".definition"),
                ({**LARK, "definition": "x" * 65537}, ".definition"),
            )
        ),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [TOOL, make_tool(nested_json(31))]}, "tools[1]"),
        ({"tools": [make_tool({"description": "x" * 65536})]}, "tools[0]"),
        (kwargs(messages=[]), "chat_template_kwargs.messages"),
        (kwargs(tools=[]), "chat_template_kwargs.tools"),
        (kwargs(enable_thinking=1), "chat_template_kwargs.enable_thinking"),
        (kwargs(thinking="false"), "chat_template_kwargs.thinking"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "x", "content": "y"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "y"}]}, "messages[0].role"),
        ({"messages": [{"role": {}, "content": "y"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as invalid:
        read_chat(**fields)
    assert invalid.value.param == param
    assert len(invalid.value.message) < 200


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ("x", "type"),
        ({"type": "image_embeds"}, "type"),
        ({"type": ["image_url"]}, "type"),
        ({"type": "text"}, "text"),
        ({"type": "text", "text": 5}, "text"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": "http://a/x.png"}, "image_url"),
        ({"type": "image", "image": "/etc/passwd"}, "image"),
        ({"type": "input_image", "image_url": 5}, "image_url"),
        ({"type": "video_url", "video_url": {"url": "file:///x"}}, "video_url"),
        ({"type": "audio", "audio": "/etc/passwd"}, "audio"),
    ],
)
def test_an_invalid_content_part_is_named(part: Any, param: str) -> None:
    with pytest.raises(FieldError) as invalid:
        read_content_parts(part)
    assert invalid.value.param == f"messages[0].content[0].{param}"


def test_pictures_are_bounded_in_number_and_in_total_pixels() -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE}}
    large = {"type": "image_url", "image_url": {"url": data_url(png_header(6000, 6000))}}
    read_content_parts(*[part] * PICTURES_LIMIT)
    read_content_parts(large)
    with pytest.raises(FieldError, match="at most 32 pictures") as too_many:
        read_content_parts(*[part] * PICTURES_LIMIT, part)
    assert too_many.value.param == "messages[0].content[32].image_url"
    with pytest.raises(FieldError, match="pixels in all") as too_large:
        read_content_parts(large, large)
    assert too_large.value.param == "messages[0].content[1].image_url"


def test_a_value_may_reach_its_bound() -> None:
    assert read_chat(tools=[make_tool(nested_json(30))] * 128).tools
    assert read_chat(chat_template_kwargs={"enable_thinking": True, "x": [1]}) == read_chat()
    for seed in (-(2**63), 2**63 - 1):
        assert read_chat(seed=seed).sampling.seed == seed
    assert [read_chat(draft_tokens=count).draft_tokens for count in (0, 8)] == [0, 8]


def test_no_top_log_probabilities_are_no_request_for_any() -> None:
    """0 is vLLM's default, and its clients send it without `logprobs`."""
    assert read_chat(top_logprobs=0).top_logprobs is None
    assert read_chat(top_logprobs=0, logprobs=False).top_logprobs is None
    assert read_chat(top_logprobs=0, logprobs=True).top_logprobs == 0


def test_completions_have_openais_default_length_and_their_own_fields() -> None:
    profile = read_profile({"model": "m", "prompt": "abc", "logprobs": 2}, Endpoint.COMPLETIONS)
    assert (profile.max_tokens, profile.text_chars, profile.top_logprobs) == (16, 3, 2)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        *(({"prompt": prompt}, "prompt") for prompt in ("", [], 7, ["a"] * 129)),
        *(({"prompt": prompt}, "prompt[0]") for prompt in ([-1], [1, True])),
        *(({"prompt": prompt}, "prompt[1]") for prompt in (["a", ""], [[1], []], ["a", 2**31])),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
    )
    for fields, param in cases:
        with pytest.raises(FieldError) as invalid:
            read_profile({"model": "m", **fields}, Endpoint.COMPLETIONS)
        assert invalid.value.param == param


TEXTS = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    "model messages prompt temperature top_p top_k min_p seed n stop stream stream_options tools "
    "tool_choice response_format logprobs top_logprobs logit_bias max_tokens".split()
)


@given(st.dictionaries(FIELDS, JSON), st.sampled_from(Endpoint))
def test_any_json_is_parsed_or_an_invalid_field(fields: dict[str, Any], endpoint: Endpoint) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    with contextlib.suppress(FieldError):
        read_profile(body, endpoint)


@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON)))
def test_any_messages_are_parsed_or_rejected(messages: list[dict[str, Any]]) -> None:
    with contextlib.suppress(FieldError):
        read_chat(messages=messages)
