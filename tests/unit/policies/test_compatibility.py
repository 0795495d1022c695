"""Fields that change no answer are accepted and listed; all others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from policies.request.compatibility import NEUTRAL
from policies.request.fields import FieldError
from policies.request.parser import HONOURED_FIELDS, read_profile
from policies.request.profile import Endpoint
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
    assert read_chat(**given).ignored == (
        *("verbosity", "store", "modalities", "prediction", "best_of"),
    )


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
        ("continue_final_message", True),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [1]),
        ("functions", [{"name": "f"}]),
        ("chat_template", "{{ messages }}"),
        ("logits_processors", ["x"]),
        ("echo", True),
    ],
)
def test_a_value_that_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match=name) as refused:
        read_chat(**{name: value})
    assert refused.value.param == name


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
    ("fields", "param"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_an_invalid_field_of_vllm_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as invalid:
        read_chat(**fields)
    assert invalid.value.param == param


def test_an_assistant_message_may_be_a_refusal() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert read_chat(messages=[refused]).messages == 1
