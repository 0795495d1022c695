"""One streamed answer of a running server: its times, and the tokens that a cache held."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import httpx

ANSWER_TOKENS: Final = 48
SENTENCE: Final = "The red fox sees the old tree and the blue boat finds the warm stone. "
_SENTENCE_TOKENS: Final = 15


class Turn(NamedTuple):
    """One turn of a chat."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int | None
    """None from a server that does not report them."""
    answer_tokens: int
    text: str


def text_of(tokens: int, name: str) -> str:
    """Return a text of about so many tokens, which begins like no other."""
    return f"Document {name}. " + SENTENCE * (tokens // _SENTENCE_TOKENS)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def ask(
    client: httpx.AsyncClient,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    on_text: Callable[[float], object] = lambda _: None,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> Turn:
    """Stream an answer; `on_text` gets the time of each piece of text."""
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    usage: dict[str, Any] = {}
    text, first_s = "", None
    started_s = time.perf_counter()
    async for event in _events(client, body, headers or {}):
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            piece = choice.get("delta", {}).get("content") or ""
            if piece:
                now_s = time.perf_counter()
                on_text(now_s)
                first_s = first_s or now_s
            text += piece
    ended_s = time.perf_counter()
    return Turn(
        ttft_s=(first_s or ended_s) - started_s,
        total_s=ended_s - started_s,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        answer_tokens=usage.get("completion_tokens", 0),
        text=text,
    )


async def _events(
    client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[dict[str, Any]]:
    request = client.stream("POST", "/v1/chat/completions", json=body, headers=headers)
    async with request as response:
        if not response.is_success:
            await response.aread()
            raise httpx.HTTPError(f"{response.status_code}: {response.text[:300]}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def reused_share(chats: Sequence[Sequence[Turn]]) -> float | None:
    """Return the share of the tokens of earlier turns, prompts and answers, found in a cache."""
    earlier = found = 0
    for chat in chats:
        for before, turn in pairwise(chat):
            if turn.cached_tokens is None:
                return None
            earlier += before.prompt_tokens + before.answer_tokens
            found += turn.cached_tokens
    return found / earlier if earlier else None
