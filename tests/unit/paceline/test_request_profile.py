"""The profile of a valid request: its features, and those that speculation does not support."""

import itertools
from typing import Any

import pytest

from paceline.request.fields import FieldError
from paceline.request.parser import read_profile
from paceline.request.profile import Bypass, Endpoint, Sampling, bypass_reasons
from tests.support.chat_bodies import PICTURE, TOOL, read_chat, read_content_parts


def test_an_absent_field_has_its_default() -> None:
    profile = read_profile(BODY, Endpoint.CHAT, Sampling(temperature=0.3, top_k=4))
    assert (profile.sampling.temperature, profile.sampling.top_k) == (0.3, 4)
    assert (profile.choices, profile.stream) == (1, False)
    assert (profile.max_tokens, profile.stop) == (None, ())


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": PICTURE}}, "image"),
        ({"type": "input_image", "image_url": PICTURE}, "image"),
        ({"type": "image", "image": PICTURE}, "image"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}, "video"),
        ({"type": "video"}, "video"),
        ({"type": "audio_url"}, "audio"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "audio"),
        ({"type": "audio"}, "audio"),
        ({"type": "file", "file": {"file_data": "AA"}}, "file"),
    ],
)
def test_every_kind_of_media_is_counted(part: dict[str, Any], kind: str) -> None:
    profile = read_content_parts(part, {"type": "text", "text": "abc"}, part)
    assert profile.media == ((kind, 2),)
    assert profile.text_chars == 3
    assert bypass_reasons(profile)[0] is Bypass.MEDIA


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "reasoning_content": "x" * 100},
        {"role": "tool", "content": "", "tool_call_id": "x" * 100},
        {"role": "user", "content": "", "name": "x" * 100},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x" * 100}}]},
    ],
    ids=["reasoning", "call-id", "name", "calls"],
)
def test_c6_all_text_of_a_request_is_counted(message: dict[str, Any]) -> None:
    tools = [{"function": {"name": "f", "description": "x" * 100}}]
    assert 100 <= read_chat(messages=[message]).text_chars <= 200
    assert 100 <= read_chat(tools=tools).text_chars <= 200


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({}, [Bypass.NON_GREEDY_SAMPLING]),
        ({"temperature": 0.1}, [Bypass.NON_GREEDY_SAMPLING]),
        ({"top_k": 2}, [Bypass.NON_GREEDY_SAMPLING]),
        *(
            ({"temperature": 0, name: value}, [Bypass.LOGITS_PROCESSORS])
            for name, value in (
                *(("presence_penalty", 1), ("frequency_penalty", -1)),
                *(("repetition_penalty", 1.1), ("logit_bias", {"5": 1})),
            )
        ),
        ({"temperature": 0, "logprobs": True}, [Bypass.LOGPROBS]),
        ({"temperature": 0, "n": 2}, [Bypass.MULTIPLE_CHOICES]),
        ({"temperature": 0, "exact": True}, [Bypass.EXACT]),
        ({"temperature": 0}, []),
        ({"temperature": 0, "top_p": 0.5, "min_p": 0.1, "seed": 3}, []),
        ({"top_k": 1}, []),
        ({"temperature": 0, "response_format": {"type": "text"}}, []),
        ({"temperature": 0, "response_format": {"type": "json_object"}}, []),
        ({"temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}}, []),
        ({"temperature": 0, "tools": [TOOL], "stop": "x", "stream": True, "max_tokens": 5}, []),
        ({"temperature": 0, "n": 1, "presence_penalty": 0, "logit_bias": {}}, []),
    ],
)
def test_each_feature_that_greedy_text_does_not_have_is_a_bypass_reason(fields, reasons) -> None:
    assert [*bypass_reasons(read_chat(**fields))] == reasons


BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_the_policy_decides_whether_an_answer_is_exact_if_the_request_does_not() -> None:
    for given, by_policy in itertools.product((None, True, False), (True, False)):
        profile = read_profile({**BODY, "exact": given}, Endpoint.CHAT, exact=by_policy)
        assert profile.exact is (by_policy if given is None else given)


@pytest.mark.parametrize(("name", "value"), [("draft_tokens", 2), ("specprefill", True)])
def test_a_field_that_contradicts_an_exact_answer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match="exact") as refused:
        read_profile({**BODY, name: value}, Endpoint.CHAT, exact=True)
    assert refused.value.param == name
    assert read_profile({**BODY, name: type(value)()}, Endpoint.CHAT, exact=True).exact


def test_some_values_mean_what_their_absence_means() -> None:
    assert read_chat(top_k=-1).sampling.top_k == 0, "the whole vocabulary"
    assert read_chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not read_chat(stream=True, stream_options={}).include_usage
    assert read_chat(tools=[TOOL]).tools
    assert not read_chat(tools=[TOOL], tool_choice="none").tools


def test_a_tool_may_have_any_name_that_a_model_can_write() -> None:
    """A name that is markup in a call is refused."""
    for name in ("a", "get weather", "mcp:files/read", "a.b-c_d", "x" * 128, "ä"):
        assert read_chat(tools=[{**TOOL, "function": {"name": name}}]).tools
    for name in ("", " a", "a ", "a\nb", "a\tb", "a<b", 'a"b', "f(x)", "x" * 129, "a{"):
        with pytest.raises(FieldError, match="brackets") as refused:
            read_chat(tools=[TOOL, {**TOOL, "function": {"name": name}}])
        assert refused.value.param == "tools[1].function.name"


def test_an_assistant_that_only_calls_tools_needs_no_content() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    profile = read_chat(messages=[{"role": "assistant", "content": None, "tool_calls": calls}])
    assert profile.messages == 1
