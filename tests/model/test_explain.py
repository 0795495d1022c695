"""Explanations of requests that a worker would refuse, on the real engine behind the gateway."""

from typing import Any

import httpx
import pytest
from openai import OpenAI

QUESTION: Any = [{"role": "user", "content": "Count from 1 to 3."}]


def explain(client: OpenAI, body: bytes | dict[str, Any]) -> httpx.Response:
    url = str(client.base_url.join("route/explain"))
    if isinstance(body, bytes):
        return httpx.post(url, content=body, timeout=60)
    return httpx.post(url, json={"model": "demo", **body}, timeout=60)


def answer(client: OpenAI, body: dict[str, Any]) -> httpx.Response:
    path = "completions" if "prompt" in body else "chat/completions"
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    return httpx.post(
        str(client.base_url.join("responses" if "input" in body else path)),
        json={"model": "demo", limit: 16, **body},
        timeout=60,
    )


@pytest.mark.parametrize(
    "body",
    [
        {"messages": QUESTION},
        {"messages": QUESTION, "n": 3, "response_format": {"type": "json_object"}},
        {"prompt": ["One, two,", "Three"]},
    ],
)
def test_a_servable_request_has_the_tokens_of_its_prompt(openai_client, body) -> None:
    explanation = explain(openai_client, body).json()
    assert (explanation["servable"], explanation["checked"]) == (True, True)
    usage = answer(openai_client, body).json()["usage"]
    assert explanation["prompt_tokens"] == usage["prompt_tokens"]


LONG = "word " * 40_000
TOO_LONG, UNSUPPORTED = "context_length_exceeded", "unsupported_value"
AUDIO = {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"uniqueItems": True}}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (
            {"messages": QUESTION, "guided_json": {"uniqueItems": True}},
            "guided_json.uniqueItems",
            UNSUPPORTED,
        ),
        ({"messages": [{"role": "user", "content": LONG}]}, "messages", TOO_LONG),
        ({"prompt": LONG}, "prompt", TOO_LONG),
        ({"messages": QUESTION, "logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        (
            {"input": "Count to 3.", "text": {"format": SCHEMA}},
            "text.format.schema.uniqueItems",
            UNSUPPORTED,
        ),
        (
            {"messages": [{"role": "user", "content": [AUDIO]}]},
            "messages[0].content[0].type",
            UNSUPPORTED,
        ),
    ],
)
def test_what_the_worker_would_refuse_is_not_servable(openai_client, body, param, code) -> None:
    """The explanation has the error that the request would get, with the names of its format."""
    explanation = explain(openai_client, body).json()
    assert (explanation["servable"], explanation["checked"]) == (False, True)
    refused = answer(openai_client, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert explanation["refusal"] == {name: error[name] for name in ("message", "param", "code")}


def test_half_of_a_surrogate_pair_is_an_invalid_body(openai_client: OpenAI) -> None:
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}'
    refused = explain(openai_client, body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_json"
