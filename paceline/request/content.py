"""The content of a body within bounds: messages, text, media, and the sizes of pictures.

A file of a hundred kilobytes can expand to gigabytes, so the size of a picture is read from the
bytes of its headers, before anything is decoded.
"""

import base64
import binascii
import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.request.fields import FieldError, Fields
from paceline.request.json_pieces import json_bytes
from paceline.request.keys import Inside, check_keys
from paceline.request.profile import Endpoint

PICTURES_LIMIT = 32
"""The maximum number of pictures in one request."""
PICTURE_LIMIT_BYTES = 32 * 1024 * 1024
PIXELS_LIMIT = 64_000_000
"""The maximum of pixels of all pictures of one request together."""
SIDES_LIMIT = 200
"""The maximum aspect ratio of a picture; engines fail on narrower ones."""
PROMPTS_LIMIT = 128
"""The maximum number of prompts of one completion, and of its answers."""
_PROMPT_TOKENS_LIMIT = 1 << 21
_CHARS_A_TOKEN = 4
_DATA_URL = re.compile(r"data:image/(?:png|jpe?g|webp|gif);base64,", re.IGNORECASE)
_PIECE_CHARS = 4096
_BASE64_CHARS = 256 * 1024
# A photograph has a dozen segments before its pixels; more segments only cost time.
_JPEG_SEGMENTS_LIMIT = 256
_CHUNKS_LIMIT = 4096
_GIF_BLOCKS_LIMIT = 16_384
_GIF_BLOCK_CHARS = 128  # a block of a larger file has up to 255 bytes
_JPEG_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xDA)))
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
FILE_PROBLEM = "A file must be in 'file_data', in base64; the gateway does not follow links or ids."


class PictureInvalid(ValueError):
    """A picture is invalid or too large; the message is for the client."""


def content_of(url: str) -> str:
    """Return the base64 text of a picture's `data:` URL; raise `PictureInvalid`."""
    return url[_begin_of_content(url) :]


def decode_base64(text: str) -> bytes:
    """Decode a text, which may have line breaks, by short calls; raise `ValueError`.

    One call for 32 MB would hold up all other threads for 150 ms.
    """
    content, rest = bytearray(), ""
    for begin in range(0, len(text), _BASE64_CHARS):
        rest += "".join(text[begin : begin + _BASE64_CHARS].split())
        whole = len(rest) // 4 * 4
        content += binascii.a2b_base64(rest[:whole], strict_mode=True)
        rest = rest[whole:] or "=" * (rest[-1:] == "=")  # nothing may follow the padding
    if rest.strip("="):
        raise binascii.Error("The text ends within a group of four characters.")
    return bytes(content)


def _begin_of_content(url: str) -> int:
    prefix = _DATA_URL.match(url)
    if prefix is None:
        raise PictureInvalid(
            "A picture must be a 'data:image/png;base64,...' URL (png, jpeg, webp or gif); "
            "the gateway does not follow links."
        )
    if len(url) - prefix.end() > PICTURE_LIMIT_BYTES // 3 * 4:
        raise PictureInvalid(f"A picture may have at most {PICTURE_LIMIT_BYTES} bytes.")
    return prefix.end()


def read_size(url: str) -> tuple[int, int]:
    """Return the width and height of a picture, from its headers; raise `PictureInvalid`."""
    content = _Content(url, _begin_of_content(url))
    try:
        size = _size(content)
    except (binascii.Error, ValueError, IndexError):
        size = None
    if size is None or not all(size):
        raise PictureInvalid("The picture is not a PNG, JPEG, WebP or GIF file.")
    shorter_px, longer_px = sorted(size)
    if longer_px > SIDES_LIMIT * shorter_px:
        raise PictureInvalid(f"The aspect ratio of a picture may be at most {SIDES_LIMIT} : 1.")
    return size


class _Content:
    """Random access to the bytes of a base64 text, which decodes a piece at a time."""

    def __init__(self, text: str, begin: int) -> None:
        self._text, self._begin = text, begin
        self.chars = len(text) - begin
        self._start, self._piece = 0, b""

    def read(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start`; raise `IndexError` when there are fewer."""
        if not 0 <= start - self._start <= len(self._piece) - count:
            group = start // 3
            first = self._begin + group * 4
            text = self._text[first : first + _PIECE_CHARS]
            self._start = group * 3
            self._piece = base64.b64decode(text[: len(text) // 4 * 4], validate=True)
        found = self._piece[start - self._start :][:count]
        if len(found) < count:
            raise IndexError(start)
        return found

    def little(self, start: int, count: int) -> int:
        return int.from_bytes(self.read(start, count), "little")

    def big(self, start: int, count: int) -> int:
        return int.from_bytes(self.read(start, count), "big")


def _size(content: _Content) -> tuple[int, int] | None:
    """Return the largest sides of the canvas and of each frame, as decoders differ in which counts.

    A file may end early: some decoders show a part.
    """
    magic = content.read(0, 12)
    if magic.startswith(b"\x89PNG\r\n\x1a\n"):
        sizes = _png_sizes(content)
    elif magic.startswith((b"GIF87a", b"GIF89a")):
        sizes = _gif_sizes(content)
    elif magic.startswith(b"RIFF") and magic.endswith(b"WEBP"):
        sizes = _webp_sizes(content)
    elif magic.startswith(b"\xff\xd8\xff"):
        sizes = _jpeg_sizes(content)
    else:
        return None
    width_px = height_px = 0
    with contextlib.suppress(IndexError):
        for width, height in sizes:
            width_px, height_px = max(width_px, width), max(height_px, height)
    return width_px, height_px


def _png_sizes(content: _Content) -> Iterator[tuple[int, int]]:
    place = 8
    for _ in range(_CHUNKS_LIMIT):
        length, kind = content.big(place, 4), content.read(place + 4, 4)
        if kind == b"IDAT":
            return
        if kind == b"IHDR":
            yield content.big(place + 8, 4), content.big(place + 12, 4)
        elif place == 8:
            break
        elif kind == b"fcTL":
            yield content.big(place + 12, 4), content.big(place + 16, 4)
        place += 12 + length
    raise ValueError(place)


def _gif_sizes(content: _Content) -> Iterator[tuple[int, int]]:
    def colors(place: int) -> int:
        flags = content.read(place, 1)[0]
        return 6 << (flags & 7) if flags & 0x80 else 0

    yield content.little(6, 2), content.little(8, 2)
    place = 13 + colors(10)
    in_data = False
    for _ in range(_GIF_BLOCKS_LIMIT + content.chars // _GIF_BLOCK_CHARS):
        kind = content.read(place, 1)[0]
        if in_data:
            place, in_data = place + 1 + kind, kind > 0
        elif kind == 0x3B:  # the end
            return
        elif kind == 0x21:  # an extension
            place, in_data = place + 2, True
        elif kind == 0x2C:  # a frame
            left, top = content.little(place + 1, 2), content.little(place + 3, 2)
            yield left + content.little(place + 5, 2), top + content.little(place + 7, 2)
            place, in_data = place + 11 + colors(place + 9), True
        else:
            place += 1
    raise ValueError(place)


def _webp_sizes(content: _Content) -> Iterator[tuple[int, int]]:
    place = 12
    for _ in range(_CHUNKS_LIMIT):
        kind, length, data = content.read(place, 4), content.little(place + 4, 4), place + 8
        if kind == b"VP8X":
            yield content.little(data + 4, 3) + 1, content.little(data + 7, 3) + 1
        elif kind == b"ANMF":
            yield content.little(data + 6, 3) + 1, content.little(data + 9, 3) + 1
        elif kind == b"VP8L" and content.read(data, 1) == b"\x2f":
            bits = content.little(data + 1, 4)
            yield (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        elif kind == b"VP8 " and content.read(data + 3, 3) == b"\x9d\x01\x2a":
            yield content.little(data + 6, 2) & 0x3FFF, content.little(data + 8, 2) & 0x3FFF
        place = data + length + length % 2
    raise ValueError(place)


def _jpeg_sizes(content: _Content) -> Iterator[tuple[int, int]]:
    place = 2
    for _ in range(_JPEG_SEGMENTS_LIMIT):
        marker = content.read(place, 2)
        if marker[0] != 0xFF:  # every marker starts with 0xFF
            break
        if marker[1] == 0xDA:  # the pixels
            return
        if marker[1] == 0xFF:  # a byte of padding
            place += 1
        elif marker[1] in _JPEG_WITHOUT_LENGTH:
            place += 2
        else:
            if marker[1] in _JPEG_FRAMES:
                yield content.big(place + 7, 2), content.big(place + 5, 2)
            place += 2 + content.big(place + 2, 2)
    raise ValueError(place)


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
_NAME_LETTER = r"[^\s\x00-\x1f\x7f-\x9f<>{}()\[\]\"\\|,;=]"
TOOL_NAME = rf"{_NAME_LETTER}(?:(?:{_NAME_LETTER}| ){{0,126}}?{_NAME_LETTER})?"
"""Pattern of a function's name: it fits into the text of a call in every format, and a reader can
find it there. Colons and spaces within it are letters; brackets and quotes are markup."""
MESSAGE_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal")
"""Optional texts of a message, for the chat template."""
CONTINUES = ("prefix", "partial")
"""Marks of a last message that the answer goes on from, as three other makers spell it."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""The field of each kind of part that holds its text."""


@dataclass(slots=True)
class Content:
    """The totals over all messages."""

    media: Counter[str] = field(default_factory=Counter)
    pixels: int = 0
    messages: int = 0
    prompts: int = 1
    text_chars: int = 0
    continued: str = ""
    """The place of the first mark that makes the answer continue a message."""
    inside: Inside = field(default_factory=Inside)


def read_content(body: Mapping[str, Any], endpoint: Endpoint) -> Content:
    """Return the content of a body; raise `FieldError` for the first invalid part."""
    if endpoint is Endpoint.COMPLETIONS:
        prompts = read_texts(body, "prompt", PROMPTS_LIMIT)
        return Content(messages=len(prompts), prompts=len(prompts), text_chars=chars_of(prompts))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages", "'messages' must be a non-empty list.")
    found = Content(messages=len(messages))
    for index, message in enumerate(messages):
        _read_message(message, f"messages[{index}]", found)
        found.continued = found.continued or _mark_of(message, f"messages[{index}]")
    found.inside.echoed = False
    return found


def read_texts(body: Mapping[str, Any], name: str, limit: int) -> tuple[str | Sequence[int], ...]:
    """Return the texts of a field, each as text or as tokens; raise `FieldError`."""
    given = body.get(name)
    if given is None:
        raise FieldError(name, f"Missing required field '{name}'.")
    # A list of numbers is one text; an empty list is none.
    texts = given if isinstance(given, list) and not (given and are_tokens(given)) else [given]
    if not 1 <= len(texts) <= limit:
        raise FieldError(name, f"'{name}' must have 1 to {limit} texts.")
    for index, text in enumerate(texts):
        # An engine may fail on an empty text.
        if not text or not (isinstance(text, str) or are_tokens(text)):
            raise FieldError(
                f"{name}[{index}]" if texts is given else name,
                f"'{name}' must be a non-empty string, a non-empty list of tokens, or a list of "
                "these.",
            )
    return tuple(texts)


def chars_of(texts: Iterable[str | Sequence[int]]) -> int:
    """Return about how many characters texts have."""
    return sum(len(one) * (1 if isinstance(one, str) else _CHARS_A_TOKEN) for one in texts)


def are_tokens(value: Any) -> bool:
    """Return whether a value is a list of token ids, of bounded length."""
    return (
        isinstance(value, list)
        and len(value) <= _PROMPT_TOKENS_LIMIT
        and all(type(token) is int and 0 <= token <= Fields.LARGEST for token in value)
    )


def source_of(part: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the name of the source field of a media part, and the source if it is text."""
    kind = str(part["type"])
    bare = kind.removeprefix("input_").removesuffix("_url")
    name = next((name for name in (kind, bare, f"{bare}_url") if name in part), f"{bare}_url")
    source = part.get(name)
    if isinstance(source, Mapping):
        source = source.get("url")
    return name, source if isinstance(source, str) else None


def file_fault(file: Any) -> str:
    """Return the field that prevents reading a file; empty if its data is present."""
    fields = file if isinstance(file, Mapping) else {}
    linked = (name for name in ("file_url", "file_id") if fields.get(name) is not None)
    return next(linked, "" if isinstance(fields.get("file_data"), str) else "file_data")


def _read_message(message: Any, where: str, found: Content) -> None:
    if not isinstance(message, Mapping):
        raise FieldError(where, "A message must be an object.")
    role = message.get("role")
    found.inside.echoed = role == "assistant"
    check_keys("CHAT messages", message, found.inside, where)
    if not isinstance(role, str) or role not in ROLES:
        raise FieldError(f"{where}.role", f"The role must be one of {sorted(ROLES)}.")
    content = message.get("content")
    if isinstance(content, str):
        found.text_chars += len(content)
    elif isinstance(content, list):
        for index, part in enumerate(content):
            _read_part(part, f"{where}.content[{index}]", found)
    elif content is not None or role != "assistant":  # which may have reasoned or called alone
        raise FieldError(f"{where}.content", "The content must be a string or a list of parts.")
    for name in MESSAGE_TEXTS:
        text = message.get(name) or ""
        if not isinstance(text, str):
            raise FieldError(f"{where}.{name}", f"'{name}' must be a string.")
        found.text_chars += len(text)
    if calls := message.get("tool_calls"):
        found.text_chars += json_bytes(calls)
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            at = f"{where}.tool_calls[{index}]"
            check_keys("CHAT messages.tool_calls", call, found.inside, at)
            function = call.get("function") if isinstance(call, Mapping) else None
            check_keys(
                "CHAT messages.tool_calls.function", function, found.inside, f"{at}.function"
            )


def marks_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marks of a message that let the answer continue it."""
    return {name: message[name] for name in CONTINUES if message.get(name) is not None}


def _mark_of(message: Mapping[str, Any], where: str) -> str:
    """Return the place of the mark that makes the answer continue a message; else empty."""
    for name, mark in marks_of(message).items():
        if not isinstance(mark, bool):
            raise FieldError(f"{where}.{name}", f"'{name}' must be true or false.")
        if mark:
            return f"{where}.{name}"
    return ""


def _read_part(part: Any, where: str, found: Content) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or (kind not in TEXT_PARTS and kind not in MEDIA_KINDS):
        raise FieldError(f"{where}.type", "This type of content part is not supported.")
    check_keys("CHAT messages.content", part, found.inside, where)
    if (name := TEXT_PARTS.get(kind)) is not None:
        if not isinstance(part.get(name), str):
            raise FieldError(f"{where}.{name}", f"A text part needs a '{name}' string.")
        found.text_chars += len(part[name])
        return
    found.media[MEDIA_KINDS[kind]] += 1
    name, source = source_of(part)
    check_keys("CHAT messages.content.source", part.get(name), found.inside, f"{where}.{name}")
    if MEDIA_KINDS[kind] == "image":
        _read_picture(source, f"{where}.{name}", found)
    elif kind == "file" and (field := file_fault(part.get(kind))):
        raise FieldError(f"{where}.file.{field}", FILE_PROBLEM)
    elif source is not None and not source.startswith("data:"):
        # Fetching a client's URL could reveal resources of the internal network.
        raise FieldError(f"{where}.{name}", "Media must be in a 'data:' URL.")


def _read_picture(source: str | None, where: str, found: Content) -> None:
    if found.media["image"] > PICTURES_LIMIT:
        raise FieldError(where, f"A request may contain at most {PICTURES_LIMIT} pictures.")
    try:
        found.pixels += math.prod(read_size(source or ""))
    except PictureInvalid as invalid:
        raise FieldError(where, str(invalid)) from None
    if found.pixels > PIXELS_LIMIT:
        raise FieldError(
            where, f"The pictures of a request may have at most {PIXELS_LIMIT} pixels in total."
        )
