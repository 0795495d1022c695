"""The messages of a body: their roles and parts, their text and their media, within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policies.request.content import PICTURES_LIMIT, PIXELS_LIMIT, PictureInvalid, read_size
from policies.request.fields import FieldError
from policies.request.profile import Endpoint

# Kind of every media part of Chat Completions and of Responses (DESIGN section 4).
MEDIA_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "video": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio": "audio",
    "file": "file",
}
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_KINDS = frozenset({"text", "input_text", "output_text"})


@dataclass(slots=True)
class Content:
    """What all messages hold together."""

    media: Counter[str] = field(default_factory=Counter)
    pixels: int = 0
    messages: int = 0
    text_chars: int = 0


def read_content(body: Mapping[str, Any], endpoint: Endpoint) -> Content:
    """Count what a body holds; raise `FieldError` naming the first part that is wrong."""
    found = Content()
    if endpoint is Endpoint.COMPLETIONS:
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:  # an engine may break on no token at all
            raise FieldError("prompt", "'prompt' must be one non-empty string.")
        found.messages, found.text_chars = 1, len(prompt)
        return found
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", "'messages' must be a non-empty list.")
    for index, message in enumerate(messages):
        _read_message(message, f"messages[{index}]", found)
    found.messages = len(messages)
    return found


def source_of(part: Mapping[str, Any]) -> tuple[str, str | None]:
    """Name the field of a media part that holds its source, and return that, if it is text."""
    kind = str(part["type"])
    bare = kind.removeprefix("input_").removesuffix("_url")
    name = next((name for name in (kind, bare, f"{bare}_url") if name in part), f"{bare}_url")
    source = part.get(name)
    if isinstance(source, Mapping):
        source = source.get("url")
    return name, source if isinstance(source, str) else None


def _read_message(message: Any, where: str, found: Content) -> None:
    if not isinstance(message, Mapping):
        raise FieldError(where, "A message must be an object.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise FieldError(f"{where}.role", f"The role must be one of {sorted(ROLES)}.")
    content = message.get("content")
    if isinstance(content, str):
        found.text_chars += len(content)
    elif isinstance(content, list):
        for index, part in enumerate(content):
            _read_part(part, f"{where}.content[{index}]", found)
    elif content is not None or not message.get("tool_calls"):
        raise FieldError(f"{where}.content", "The content must be a string or a list of parts.")


def _read_part(part: Any, where: str, found: Content) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or (kind not in _TEXT_KINDS and kind not in MEDIA_KINDS):
        raise FieldError(f"{where}.type", "This kind of content part is not known.")
    if kind in _TEXT_KINDS:
        if not isinstance(part.get("text"), str):
            raise FieldError(f"{where}.text", "A text part needs a 'text' string.")
        found.text_chars += len(part["text"])
        return
    found.media[MEDIA_KINDS[kind]] += 1
    name, source = source_of(part)
    if MEDIA_KINDS[kind] == "image":
        _read_picture(source, f"{where}.{name}", found)
    elif source is not None and kind != "file" and not source.startswith("data:"):
        # Whoever fetches for a stranger can be sent to what only this network may see.
        raise FieldError(f"{where}.{name}", "Media must come as a 'data:' URL.")


def _read_picture(source: str | None, where: str, found: Content) -> None:
    if found.media["image"] > PICTURES_LIMIT:
        raise FieldError(where, f"A request may hold at most {PICTURES_LIMIT} pictures.")
    try:
        found.pixels += read_size(source or "").pixels
    except PictureInvalid as invalid:
        raise FieldError(where, str(invalid)) from None
    if found.pixels > PIXELS_LIMIT:
        raise FieldError(
            where, f"The pictures of a request may have at most {PIXELS_LIMIT} pixels in all."
        )
