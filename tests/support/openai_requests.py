"""Questions for the demo model, and answers that the `openai` package returns."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAI
from PIL import Image, ImageDraw

TEXT = "Count from 1 to 20."
LONG_TEXT = "Count from 1 to 120."
PICTURE_QUESTION = "What colour is the shape?"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResult:
    """An answer, streamed or not, in the same fields."""

    text: str
    finish_reason: str
    headers: Mapping[str, str]
    prompt_tokens: int
    completion_tokens: int
    metrics: Mapping[str, Any] | None

    @property
    def speculation(self) -> Mapping[str, Any]:
        assert self.metrics is not None
        return self.metrics["speculative_decoding"]


def text_body(model: str, question: str = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": question}], **fields}


def picture_body(
    model: str, colour: str, question: str = PICTURE_QUESTION, *, size: int = 256, **fields: Any
) -> dict[str, Any]:
    """Return a request about the colour of a circle."""
    picture = Image.new("RGB", (size, size), "gray")
    ImageDraw.Draw(picture).ellipse([size // 5, size // 5, size * 4 // 5, size * 4 // 5], colour)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


def turns_body(path: str, turns: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Return the fields of a request of any wire, in which user and assistant speak in turn."""
    said = [{"role": ("user", "assistant")[at % 2], "content": one} for at, one in enumerate(turns)]
    if path == "/v1/completions":
        return {"prompt": "".join(turns), "max_tokens": max_tokens}
    if path == "/v1/responses":
        return {"input": said, "max_output_tokens": max_tokens}
    return {"messages": said, "max_tokens": max_tokens}


def text_and_cached_tokens(answer: dict[str, Any]) -> tuple[str, int]:
    """Return the text of an answer of any wire, and how much of its prompt was cached."""
    usage = answer["usage"]
    if "content" in answer:
        return answer["content"][-1]["text"], usage["cache_read_input_tokens"]
    if "output" in answer:
        text = answer["output"][-1]["content"][0]["text"]
        return text, usage["input_tokens_details"]["cached_tokens"]
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, usage["prompt_tokens_details"]["cached_tokens"]


def send_chat(client: OpenAI, body: Mapping[str, Any], *, stream: bool = False) -> ChatResult:
    create: Any = client.chat.completions.with_raw_response.create
    if not stream:
        raw = create(**body)
        return from_completion(raw.headers, raw.parse())
    raw = create(**body, **STREAMED)
    return from_chunks(raw.headers, list(raw.parse()))


async def send_chat_async(
    client: AsyncOpenAI, body: Mapping[str, Any], *, stream: bool = False
) -> ChatResult:
    create: Any = client.chat.completions.with_raw_response.create
    if not stream:
        raw = await create(**body)
        return from_completion(raw.headers, raw.parse())
    raw = await create(**body, **STREAMED)
    return from_chunks(raw.headers, [chunk async for chunk in raw.parse()])


def from_completion(headers: Mapping[str, str], completion: Any) -> ChatResult:
    (choice,) = completion.choices
    return ChatResult(
        text=choice.message.content,
        finish_reason=choice.finish_reason,
        headers=headers,
        prompt_tokens=completion.usage.prompt_tokens,
        completion_tokens=completion.usage.completion_tokens,
        metrics=(completion.model_extra or {}).get("metrics"),
    )


def from_chunks(headers: Mapping[str, str], chunks: list[Any]) -> ChatResult:
    *parts, last = chunks
    choices = [choice for chunk in parts for choice in chunk.choices]
    return ChatResult(
        text="".join(choice.delta.content or "" for choice in choices),
        finish_reason=choices[-1].finish_reason,
        headers=headers,
        prompt_tokens=last.usage.prompt_tokens,
        completion_tokens=last.usage.completion_tokens,
        metrics=(last.model_extra or {}).get("metrics"),
    )
