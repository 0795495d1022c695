"""One turn of a chat against a running server: its times, and the tokens that a cache held."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

ANSWER_TOKENS: Final = 48
SENTENCE: Final = "The red fox sees the old tree and the blue boat finds the warm stone. "


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of one chat."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int | None
    """None from a server that does not report them."""
    answer_tokens: int


async def ask(
    client: httpx.AsyncClient,
    model: str,
    messages: Sequence[Mapping[str, str]],
    *,
    on_event: Callable[[float], object] = lambda _: None,
    extra: Mapping[str, object] | None = None,
) -> tuple[Turn, str]:
    """Return a turn and the text of its answer; `on_event` gets the time of each event."""
    body = {
        "model": model, "messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS,
        "stream": True, "stream_options": {"include_usage": True}, **(extra or {}),
    }  # fmt: skip
    usage: dict[str, Any] = {}
    text, first_s = "", None
    started_s = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                piece = choice.get("delta", {}).get("content") or ""
                if piece:
                    on_event(time.perf_counter())
                    first_s = first_s or time.perf_counter()
                text += piece
    details = usage.get("prompt_tokens_details") or {}
    ended_s = time.perf_counter()
    turn = Turn(
        ttft_s=(first_s or ended_s) - started_s,
        total_s=ended_s - started_s,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens"),
        answer_tokens=usage.get("completion_tokens", 0),
    )
    return turn, text
