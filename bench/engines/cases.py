"""Requests of all wires to one engine, and what a client sees of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import httpx
from PIL import Image

from tests.support.images import encode_image

WORD: Final = "What is 3 plus 4?"
WEATHER: Final = "What is the weather in Paris?"
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
LONG: Final = "word " * 60_000
_ANSWER_CHARS: Final = 48


class Seen(NamedTuple):
    """What a client has seen of one case."""

    status: int
    text: str
    """The answer, or the code and the field of the error."""

    @property
    def verdict(self) -> str:
        """Return the result in one cell; a server error of any kind is a failure."""
        word = "ok" if self.status == 200 else "refused" if 400 <= self.status < 500 else "FAILED"
        return f"{word} {self.status}: {self.text}"


def chat(text: object, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, **fields}


def picture() -> list[dict[str, Any]]:
    image = Image.new("RGB", (64, 64), (220, 30, 30))
    return [
        {"type": "image_url", "image_url": {"url": encode_image(image)}},
        {"type": "text", "text": "What is in this picture?"},
    ]


def bodies() -> Mapping[str, tuple[str, dict[str, Any]]]:
    chats = "/v1/chat/completions"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {
        "chat": (chats, chat(WORD, temperature=0)),
        "chat, streamed": (chats, chat(WORD, temperature=0, stream=True)),
        "chat, sampled": (chats, chat(WORD, temperature=0.8, top_p=0.9, seed=7)),
        "tools": (chats, chat(WEATHER, tools=[TOOL], temperature=0, max_tokens=60)),
        "tools, streamed": (
            chats,
            chat(WEATHER, tools=[TOOL], temperature=0, max_tokens=60, stream=True),
        ),
        "picture": (chats, chat(picture(), temperature=0)),
        "stop": (chats, chat(WORD, stop=["7"], temperature=0)),
        "n = 2": (chats, chat(WORD, n=2)),
        "logprobs": (chats, chat(WORD, logprobs=True, top_logprobs=2, temperature=0)),
        "schema": (chats, chat(WORD, response_format=form)),
        "top_k, min_p": (chats, chat(WORD, top_k=5, min_p=0.1, temperature=0.7)),
        "logit_bias": (chats, chat(WORD, logit_bias={"5": -100}, temperature=0)),
        "too long": (chats, chat(LONG)),
        "too long, streamed": (chats, chat(LONG, stream=True)),
        "completion": ("/v1/completions", {"prompt": WORD, "max_tokens": 8, "temperature": 0}),
        "messages": ("/v1/messages", chat(WORD)),
        "messages, streamed": ("/v1/messages", chat(WORD, stream=True)),
        "responses": ("/v1/responses", {"input": WORD, "max_output_tokens": 24}),
        "responses, streamed": (
            "/v1/responses",
            {"input": WORD, "max_output_tokens": 24, "stream": True},
        ),
    }


def run_case(client: httpx.Client, model: str, name: str) -> Seen:
    path, body = bodies()[name]
    response = client.post(path, json={"model": model, **body})
    return Seen(response.status_code, _text_of(response, path, body))


def run_cases(client: httpx.Client, model: str, *, long_prompts: bool) -> dict[str, str]:
    """Run all cases, one after another; return what the client sees of each."""
    return {
        name: run_case(client, model, name).verdict
        for name in bodies()
        if long_prompts or not name.startswith("too long")
    }


def _text_of(response: httpx.Response, path: str, body: Mapping[str, Any]) -> str:
    if response.status_code != 200:
        error = response.json().get("error", {})
        return f"{error.get('code', error.get('type'))} {error.get('param') or ''}".strip()
    if body.get("stream"):
        return _streamed_text(response.text)
    answer = response.json()
    if path == "/v1/messages":
        return _short("".join(block.get("text", "") for block in answer["content"]))
    if path == "/v1/responses":
        parts = [part for item in answer["output"] for part in item.get("content", ())]
        return _short("".join(part.get("text", "") for part in parts))
    choice = answer["choices"][0]
    if path == "/v1/completions":
        return _short(choice["text"])
    message = choice["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    text = ", ".join(calls) or message.get("content") or ""
    return _short(f"{len(answer['choices'])} x {text}" if len(answer["choices"]) > 1 else text)


def _streamed_text(text: str) -> str:
    """Return the text of a stream of any wire; raise `ValueError` for one without an end."""
    found = ""
    ended = False
    for line in text.splitlines():
        if line == "data: [DONE]":
            ended = True
        if not line.startswith("data: {"):
            continue
        frame = json.loads(line[6:])
        if frame.get("error"):
            return f"error event {frame['error'].get('code')}"
        ended = ended or frame.get("type") in (
            "message_stop",
            "response.completed",
            "response.incomplete",
        )
        for choice in frame.get("choices", ()):
            delta = choice.get("delta", {})
            found += delta.get("content") or choice.get("text") or ""
            for call in delta.get("tool_calls") or ():
                found += call.get("function", {}).get("name") or ""
        delta = frame.get("delta")
        found += delta if isinstance(delta, str) else (delta or {}).get("text", "")
    if not ended:
        raise ValueError("a stream has no end")
    return _short(found)


def _short(text: str) -> str:
    return " ".join(text.split())[:_ANSWER_CHARS]
