"""`token_sources`: every token of an answer with its source, as the draft counts sum them up."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from pydantic_core import from_json

from tests.support.openai_requests import TEXT, picture_body, text_body
from tests.support.worker_process import SUPPRESS_END_TOKENS, byte_token
from workers.server.request import LANE_HEADER

GREEDY: Mapping[str, Any] = {"temperature": 0, "max_tokens": 40, "draft_tokens": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedAnswer:
    """One choice of an answer: its text, and its tokens with their sources."""

    text: str
    tokens: list[Mapping[str, str]]

    @property
    def joined(self) -> str:
        return "".join(token["text"] for token in self.tokens)

    @property
    def drafted(self) -> int:
        return len(self.tokens) - Counter(token["source"] for token in self.tokens)["model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedAnswers:
    choices: list[SourcedAnswer]
    completion_tokens: int
    accepted: int


async def ask(
    url: str, path: str, body: Mapping[str, Any], *, stream: bool, lane: str | None = None
) -> SourcedAnswers:
    """Request an answer with the sources of its tokens; read it whole or from its chunks."""
    body = {**body, "token_sources": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {LANE_HEADER: lane} if lane else {}
    async with httpx.AsyncClient(base_url=url, timeout=120, headers=headers) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        frames = [response.json()]
    else:
        *lines, done = [line for line in response.text.splitlines() if line]
        assert done == "data: [DONE]"
        frames = [from_json(line.removeprefix("data: ")) for line in lines]
    entries = [entry for frame in frames for entry in frame["choices"]]
    metrics = frames[-1].get("metrics") or {"speculative_decoding": {}}
    return SourcedAnswers(
        choices=[
            SourcedAnswer(
                text="".join(map(text_of, own)),
                tokens=[token for entry in own for token in entry["token_sources"]],
            )
            for index in range(body.get("n", 1))
            if (own := [entry for entry in entries if entry["index"] == index])
        ],
        completion_tokens=frames[-1]["usage"]["completion_tokens"],
        accepted=metrics["speculative_decoding"].get("num_accepted_draft_tokens", 0),
    )


def text_of(entry: Mapping[str, Any]) -> str:
    message = entry.get("message") or entry.get("delta") or {}
    return entry.get("text") or message.get("content") or ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lane", ["text-mtp", "vlm"])
@pytest.mark.parametrize("stop", [(), ("7", "1, 2, 3, 4, 5, 6, 8")])
async def test_the_drafted_tokens_of_a_chat_are_the_accepted_ones(
    worker_url: str, lane: str, stop: tuple[str, ...], *, stream: bool
) -> None:
    body = text_body("demo", **GREEDY, stop=list(stop) or None)
    answers = await ask(worker_url, "/v1/chat/completions", body, stream=stream, lane=lane)
    (answer,) = answers.choices
    assert answer.joined == answer.text
    assert answer.text.startswith("1, 2, 3")
    assert ("7" in answer.text) == (not stop)
    assert len(answer.tokens) == answers.completion_tokens
    assert answer.drafted == answers.accepted > 0
    assert {token["source"] for token in answer.tokens} == {"draft", "model"}, "k is named"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sampled_answer_about_a_picture_lists_its_tokens(worker_url, *, stream) -> None:
    body = picture_body("demo", "red", temperature=0.5, seed=3, max_tokens=12)
    answers = await ask(worker_url, "/v1/chat/completions", body, stream=stream)
    (answer,) = answers.choices
    assert answer.joined == answer.text
    assert (len(answer.tokens), answer.drafted) == (answers.completion_tokens, answers.accepted)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_lists_its_own_tokens(worker_url: str, *, stream: bool) -> None:
    body = text_body("demo", n=3, temperature=1, seed=5, max_tokens=9)
    answers = await ask(worker_url, "/v1/chat/completions", body, stream=stream)
    assert len(answers.choices) == 3
    for answer in answers.choices:
        assert answer.joined == answer.text
        assert {token["source"] for token in answer.tokens} <= {"model", "draft", "lookup"}
    assert sum(len(answer.tokens) for answer in answers.choices) == answers.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_half_a_character_are_listed_once(worker_url: str, *, stream: bool) -> None:
    """The echo of the prompt is no token of the answer."""
    emoji = [byte_token(byte) for byte in "\U0001f642".encode() if byte >= 0xA1]
    bias = {**SUPPRESS_END_TOKENS, **{str(token): 20 for token in emoji}}
    body = {**GREEDY, "model": "demo", "prompt": TEXT, "echo": True, "logit_bias": bias}
    answers = await ask(worker_url, "/v1/completions", body, stream=stream)
    (answer,) = answers.choices
    assert TEXT + answer.joined == answer.text
    assert "\ufffd" in answer.text
    assert any(not token["text"] for token in answer.tokens)
    assert (len(answer.tokens), answer.drafted) == (answers.completion_tokens, answers.accepted)


async def test_a_gateway_passes_the_sources_on_and_counts_as_without_them(demo) -> None:
    path, body = "/v1/chat/completions", text_body("demo", **GREEDY)
    for stream in (False, True):
        answers = await ask(demo.url, path, body, stream=stream)
        (answer,) = answers.choices
        assert answer.joined == answer.text
        assert (len(answer.tokens), answer.drafted) == (answers.completion_tokens, answers.accepted)
    async with httpx.AsyncClient(base_url=demo.url, timeout=120) as client:
        plain = (await client.post(path, json={**body, "token_sources": False})).json()
        streamed = await client.post(path, json={**body, "stream": True})
        refused = await client.post(path, json={**body, "token_sources": "yes"})
    assert plain["choices"][0]["message"]["content"] == answer.text
    assert plain["usage"]["completion_tokens"] == answers.completion_tokens
    assert "token_sources" not in plain["choices"][0]
    assert "token_sources" not in streamed.text
    assert refused.json()["error"]["param"] == "token_sources"
