"""Fields that change no answer are accepted and listed; all others are refused by name."""

from typing import Any

import pytest

from paceline.request.compatibility import NEUTRAL
from paceline.request.constraint import read_constraint
from paceline.request.fields import FieldError
from paceline.request.parser import HONOURED_FIELDS, read_profile
from paceline.request.profile import Endpoint
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


def test_a_custom_tool_is_refused_with_the_endpoint_that_has_it() -> None:
    with pytest.raises(FieldError, match="/v1/responses") as refused:
        read_chat(tools=[{"type": "custom", "custom": {"name": "patch"}}])
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
    nulls = dict.fromkeys({*NEUTRAL}.union(*HONOURED_FIELDS.values()))
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
