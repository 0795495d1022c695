"""What stands in for the parts of a history that no model can read.

A client sends its history again with each turn, so a part that is refused ends the conversation for
good. Such a part becomes a line of words in its place, and the response names it in a header.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from gateway.protocols.documents import DocumentUnreadable, Readable, pdf_of, words_for_pdf
from paceline.request.content import (
    MEDIA_KINDS,
    TEXT_PARTS,
    PictureInvalid,
    read_size,
    source_of,
)
from paceline.request.fields import FieldError

Json = dict[str, Any]

_KIND_CHARS = 100
_PICTURES_STEP = 8
_SAFE = "._-[]"


def words_for(kind: str) -> str:
    """Return the words in place of a part of this type."""
    return f"[Here was a part of the type '{kind[:_KIND_CHARS]}', which this model cannot read.]"


def named(place: str, kind: str) -> str:
    """Return the place and the type of a part as a header can have them."""
    return f"{place}:{quote(kind[:_KIND_CHARS], safe=_SAFE)}"


def readable(
    body: Mapping[str, Any], reading: Readable
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the body of a chat whose history a model can read, and what words replace in it.

    What the user says in this turn stays: if no model can read it, the request is refused. Raise
    `FieldError` for a PDF of this turn that cannot be read.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body, ()
    roles = [one.get("role") if isinstance(one, Mapping) else None for one in messages]
    turn = max((index for index, role in enumerate(roles) if role == "assistant"), default=-1)
    changed: dict[int, list[Any]] = {}
    replaced: list[str] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            continue
        new = index > turn and roles[index] != "tool"
        parts, names = _readable_parts(content, f"messages[{index}].content", reading, new=new)
        if roles[index] == "tool":  # templates take pictures of pages from users alone
            del parts[len(content) :]
        if parts != content:
            changed[index] = parts
        replaced += names
    replaced += _within_limits(messages, roles, changed, turn, reading)
    if not changed:
        return body, ()
    kept = [
        {**message, "content": changed[index]} if index in changed else message
        for index, message in enumerate(messages)
    ]
    return {**body, "messages": kept}, tuple(replaced)


def _within_limits(
    messages: Sequence[Any],
    roles: Sequence[Any],
    changed: dict[int, list[Any]],
    turn: int,
    reading: Readable,
) -> list[str]:
    """Replace the oldest pictures of the history, if those of the request are too many.

    Eight at a time, so that the next pictures do not change the beginning of the prompt again. What
    tools have just shown, also in the user's message behind their results, is history too.
    """
    found = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            continue
        for place, part in enumerate(changed.get(index, content)):
            if isinstance(part, Mapping) and MEDIA_KINDS.get(str(part.get("type"))) == "image":
                found.append((index, place, part, _pixels(part)))
    pixels = sum(size for *_, size in found)
    first = 0
    while len(found) - first > reading.pictures or pixels > reading.pixels:
        if first >= len(found):
            break
        pixels -= sum(size for *_, size in found[first : first + _PICTURES_STEP])
        first += _PICTURES_STEP
    replaced = []
    for index, place, part, _ in found[:first]:
        if index <= turn or "tool" in roles[max(index - 1, 0) : index + 1]:
            parts = changed.setdefault(index, [*messages[index]["content"]])
            parts[place] = {"type": "text", "text": words_for(part["type"])}
            replaced.append(named(f"messages[{index}].content[{place}]", part["type"]))
    return replaced


def _pixels(part: Mapping[str, Any]) -> int:
    try:
        return math.prod(read_size(source_of(part)[1] or ""))
    except PictureInvalid:
        return 0


def _readable_parts(
    content: Sequence[Any], where: str, reading: Readable, *, new: bool
) -> tuple[list[Any], list[str]]:
    """Return the parts of a content, each at its place, then the pages of its documents."""
    parts: list[Any] = []
    pages: list[Any] = []
    replaced = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            parts.append(part)
            continue
        words = ""
        if (pdf := pdf_of(part)) is not None:
            try:
                text, *pictures = reading.document(pdf, part["file"].get("filename"))
                parts.append(text)
                pages += pictures
                continue
            except DocumentUnreadable as unreadable:
                if new:
                    raise unreadable_pdf(f"{at}.file.file_data", unreadable) from None
                words = words_for_pdf(str(unreadable))
        elif new or kind in TEXT_PARTS or (kind in MEDIA_KINDS and reading.takes(part)):
            parts.append(part)
            continue
        parts.append({"type": "text", "text": words or words_for(kind)})
        replaced.append(named(at, kind))
    return [*parts, *pages], replaced


def unreadable_pdf(field: str, problem: DocumentUnreadable) -> FieldError:
    """Return the error of a PDF that the user sends in this turn."""
    return FieldError(field, f"{field}: The PDF document cannot be read: {problem}.")
