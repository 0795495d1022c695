"""Fields that change no answer are accepted and listed; all others are refused by name."""

import copy
import re
from typing import Any

import pytest

from paceline.request.constraint import read_constraint
from paceline.request.fields import FieldError
from paceline.request.parser import read_profile
from paceline.request.profile import Endpoint
from paceline.request.wires import HONOURED, NEUTRAL, canonical
from tests.support.chat_bodies import read_chat


def test_fields_that_change_no_answer_are_accepted_and_listed_in_their_order() -> None:
    given: dict[str, Any] = {
        "verbosity": "low",
        "store": False,
        "modalities": ["text"],
        "prediction": {"type": "content", "content": "x"},
        "best_of": 1,
        "metadata": None,
        "temperature": 0,
    }
    assert read_chat(**given).ignored == tuple(given)[:5]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("best_of", 2),
        ("best_of", True),  # equals 1 in Python
        ("use_beam_search", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [1]),
        ("functions", [{"name": "f"}]),
        ("chat_template", "{{ messages }}"),
        ("logits_processors", ["x"]),
        ("echo", True),
        ("moderation", {"model": "m"}),
        ("truncation_side", "right"),
        ("add_special_tokens", True),
        ("logprob_token_ids", [1]),
        ("structured_outputs", {"json": {}, "disable_additional_properties": True}),
    ],
)
def test_a_value_that_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match=name) as refused:
        read_chat(**{name: value})
    assert str(refused.value.param).split(".")[0] == name


FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
PICTURE = "data:image/gif;base64,R0lGODlhAQABAAAAACw="


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("messages[0]", {"messages": [{"role": "user", "content": "Hi"}]}),
        (
            "messages[0].content[0]",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        ),
        (
            "messages[0].content[0].image_url",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": PICTURE}}],
                    }
                ]
            },
        ),
        ("tools[0]", {"tools": [FUNCTION]}),
        ("tools[0].function", {"tools": [FUNCTION]}),
        ("tool_choice", {"tools": [FUNCTION], "tool_choice": FUNCTION}),
        ("tool_choice.function", {"tools": [FUNCTION], "tool_choice": FUNCTION}),
        *(
            (
                f"tool_choice.allowed_tools{place}",
                {
                    "tools": [FUNCTION],
                    "tool_choice": {
                        "type": "allowed_tools",
                        "allowed_tools": {"mode": "auto", "tools": [copy.deepcopy(FUNCTION)]},
                    },
                },
            )
            for place in ("", ".tools[0]", ".tools[0].function")
        ),
        ("response_format", {"response_format": {"type": "json_object"}}),
        (
            "response_format.json_schema",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        ),
        ("stream_options", {"stream": True, "stream_options": {}}),
    ],
)
def test_an_unknown_name_inside_of_a_field_is_named_with_its_path_unless_it_is_null(
    path: str, fields: dict[str, Any]
) -> None:
    body = copy.deepcopy(fields)
    inner: Any = body
    for step in re.findall(r"\w+", path):
        inner = inner[int(step) if step.isdigit() else step]
    inner["odd"] = None
    assert read_chat(**body).ignored == ()
    inner["odd"] = 1
    with pytest.raises(FieldError, match="Unknown field") as refused:
        read_chat(**body)
    assert refused.value.param == f"{path}.odd"


def test_names_that_change_no_answer_are_listed_without_their_places_in_lists() -> None:
    text = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    picture = {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}}
    messages = [{"role": "user", "content": [text, text, picture]}]
    tools = [{**FUNCTION, "cache_control": {}}]
    assert read_chat(messages=messages, tools=tools, user="u").ignored == (
        "user",
        "messages.content.cache_control",
        "messages.content.image_url.detail",
        "tools.cache_control",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 20}, "repeat_penalty"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.3}, "repeat_penalty"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
        ),
    ],
)
def test_a_synonym_is_the_field_that_it_means_and_errors_name_it(fields, param) -> None:
    assert read_chat(repeat_penalty=1.2).sampling.repetition_penalty == 1.2
    body = {"enable_thinking": True, "chat_template_kwargs": {"a": 1}, "repeat_penalty": 1}
    assert canonical(body) == {
        "chat_template_kwargs": {"a": 1, "enable_thinking": True},
        "repetition_penalty": 1,
    }
    with pytest.raises(FieldError, match=f"'{param}'") as invalid:
        read_chat(**fields)
    assert invalid.value.param == param


def test_a_bound_is_told_of_the_field_that_the_client_gave() -> None:
    with pytest.raises(FieldError, match="'max_completion_tokens'"):
        read_chat(min_tokens=9, max_completion_tokens=8)
    assert dict(read_chat(thinking_token_budget=3).spelled)["thinking_budget"] == (
        "thinking_token_budget"
    )


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("grammar", "guided_grammar"),
        ("ebnf", "guided_grammar"),
        ("regex", "guided_regex"),
        ("json_schema", "response_format"),
        ("max_output_tokens", "max_tokens"),
        ("thinking", "reasoning_effort"),
    ],
)
def test_a_field_of_other_servers_is_refused_with_the_one_that_does_it(name, instead) -> None:
    with pytest.raises(FieldError, match=f"use '{instead}'") as refused:
        read_chat(**{name: "x"})
    assert refused.value.param == name


def test_a_schema_beside_json_object_is_held() -> None:
    """llama.cpp's spelling, at which others look away."""
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    for kind in ("json_object", "json_schema"):
        constraint = read_constraint({"response_format": {"type": kind, "schema": schema}})
        assert constraint is not None
        assert (constraint.value, constraint.param) == (schema, "response_format.schema")
    for odd in (
        {"type": "text", "schema": schema},
        {"type": "json_object", "json_schema": {"schema": schema}},
        {"type": "json_schema", "json_schema": {"schema": schema}, "schema": schema},
    ):
        with pytest.raises(FieldError, match="has no use"):
            read_constraint({"response_format": odd})


@pytest.mark.parametrize(("kind", "words"), [("custom", "/v1/responses"), ("acme:x", "'acme:x'")])
def test_a_tool_of_another_type_is_refused_by_its_type(kind: str, words: str) -> None:
    with pytest.raises(FieldError, match=words) as refused:
        read_chat(tools=[{"type": kind, kind: {"name": "patch"}, "function": {"name": "patch"}}])
    assert refused.value.param == "tools[0].type"


def test_every_field_of_vllms_newest_requests_is_known() -> None:
    neutral: dict[str, Any] = {"truncation_side": "left", "media_io_kwargs": {}}
    neutral |= {"ec_transfer_params": {}} | dict.fromkeys(
        ("add_special_tokens", "watermarking", "return_prompt_text"), False
    )
    hints = {"session_id": "s", "stream_interval": 4, "prompt_cache_options": {"ttl": "30m"}}
    hints |= {"return_token_offsets": True, "return_mm_kwargs": False}
    hints |= {"routed_experts_prompt_start": 0}
    absent = dict.fromkeys(("prompt_embeds", "repetition_detection", "moderation"))
    assert set(read_chat(**neutral, **hints, **absent).ignored) == {*neutral, *hints}


def test_a_completion_has_a_begin_token_unless_it_is_refused() -> None:
    def read(adds: bool) -> tuple[str, ...]:
        body = {"model": "m", "prompt": "Hi", "add_special_tokens": adds}
        return read_profile(body, Endpoint.COMPLETIONS).ignored

    assert read(True) == ("add_special_tokens",)
    with pytest.raises(FieldError, match="add_special_tokens"):
        read(False)


def test_all_fields_of_vllms_structured_outputs_may_have_their_defaults() -> None:
    """As a client sends them that has vLLM's own class."""
    absent = dict.fromkeys("regex choice grammar whitespace_pattern structural_tag".split())
    options = dict.fromkeys(
        "json_object disable_fallback disable_any_whitespace disable_additional_properties".split(),
        False,
    )
    outputs = {"json": {"type": "null"}, **absent, **options}
    constraint = read_constraint({"structured_outputs": outputs})
    assert constraint is not None
    assert constraint.param == "structured_outputs.json"


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking_token_budget": 5}, 5),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_token_budget": 5, "thinking_budget": 5}, 5),
        ({"thinking_token_budget": None, "thinking_budget": 4}, 4),
    ],
)
def test_vllms_name_of_the_budget_of_reasoning_is_the_same_field(fields, budget) -> None:
    assert read_chat(**fields).thinking_budget == budget
    with pytest.raises(FieldError, match="contradict"):
        read_chat(thinking_token_budget=5, thinking_budget=6)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_null_is_accepted_for_every_field_of_any_endpoint(endpoint: Endpoint) -> None:
    content: dict[Endpoint, dict[str, Any]] = {
        Endpoint.CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
        Endpoint.COMPLETIONS: {"prompt": "Hi"},
        Endpoint.EMBEDDINGS: {"input": "Hi"},
        Endpoint.RERANK: {"query": "Hi", "documents": ["Hi"]},
    }
    own = {"model": "m", **content[endpoint]}
    nulls = dict.fromkeys({*NEUTRAL}.union(*HONOURED.values()))
    assert read_profile(nulls | own, endpoint) == read_profile(own, endpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("min_tokens", -1), ("ignore_eos", 1)),
        *(("stop_token_ids", value) for value in (5, [True], [-1], [1] * 129)),
        *(("truncate_prompt_tokens", value) for value in (0, -2)),
    ],
)
def test_an_invalid_field_of_vllm_is_named(name: str, value: Any) -> None:
    with pytest.raises(FieldError) as invalid:
        read_chat(**{name: value})
    assert invalid.value.param == name
    with pytest.raises(FieldError, match="min_tokens"):
        read_chat(min_tokens=9, max_tokens=8)


def test_an_assistant_message_may_be_a_refusal() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert read_chat(messages=[refused]).messages == 1
    part = {"type": "refusal", "refusal": "No."}
    assert read_chat(messages=[{"role": "assistant", "content": [part]}]).text_chars == 3
    with pytest.raises(FieldError, match="'refusal' string"):
        read_chat(messages=[{"role": "assistant", "content": [{**part, "refusal": 3}]}])
