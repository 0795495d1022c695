"""The replacements for parts of a history that no model can read.

A client sends its history again with each turn, so a part that is refused ends the conversation for
good. Such a part becomes a line of words in its place, and the response names it in a header. Only
parts of the user in this turn are refused: they are `new`.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from gateway.protocols.documents import UNREAD, Document, Readable, pdf_of, pixels_of
from gateway.types import Json
from paceline.request.content import MEDIA_KINDS, TEXT_PARTS
from paceline.request.fields import FieldError

_KIND_CHARS = 100
_PICTURES_STEP = 8
BETWEEN_TEXTS = "\n\n"
"""Between merged texts, so that none runs into the next."""
_SAFE = "._-[]"


def words_for(kind: str) -> str:
    """Return the words in place of a part of this type."""
    return f"[A part of the type '{kind[:_KIND_CHARS]}', which this model cannot read.]"


def words_for_pdf(problem: str) -> str:
    """Return the words in place of a PDF that the model gets nothing of."""
    return f"[A PDF document, which cannot be read: {problem}.]"


def named(place: str, kind: str) -> str:
    """Return the place and the type of a part as a header can have them."""
    return f"{place}:{quote(kind[:_KIND_CHARS], safe=_SAFE)}"


def last_turn(roles: Sequence[Any]) -> int:
    """Return the index of the last message of the assistant, behind which all is new; -1: none."""
    return max((index for index, role in enumerate(roles) if role == "assistant"), default=-1)


def texts_of(placed: Sequence[tuple[str, Json]]) -> str:
    """Return the text of the parts of a chat, each with its place."""
    return BETWEEN_TEXTS.join(part["text"] for _, part in placed if part["type"] == "text")


def message_of(role: str, placed: Sequence[tuple[str, Json]], at: str) -> tuple[Json, list[str]]:
    """Return a message with its place and those of its parts; text lacks parts."""
    if all(part["type"] == "text" for _, part in placed):
        return {"role": role, "content": texts_of(placed)}, [at]
    parts = [part for _, part in placed]
    return {"role": role, "content": parts}, [at, *(place for place, _ in placed)]


def reply_of(texts: Sequence[str], reasoning: Sequence[str], calls: Sequence[Json]) -> Json:
    """Return a message of the assistant; empty if it has nothing."""
    if not (texts or reasoning or calls):
        return {}
    message: Json = {"role": "assistant", "content": "".join(texts) or None}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


class Replacements:
    """The parts of a chat for those of a request, or words in their place."""

    def __init__(self, reading: Readable) -> None:
        self.reading = reading
        self.replaced: list[str] = []
        """The place and the type of each part that words replace."""

    def words(self, kind: str, at: str, words: str = "") -> Json:
        """Return the part with words in place of unreadable content."""
        self.replaced.append(named(at, kind))
        return {"type": "text", "text": words or words_for(kind)}

    def document(
        self, pdf: str, name: object, kind: str, at: str, field: str, *, new: bool
    ) -> list[Json]:
        """Return the parts for a PDF, the first of them text; raise `FieldError` for a new one."""
        found = self.reading.documents.get(pdf, Document(problem=UNREAD))
        if not found.useless:
            return found.parts(name)
        if new:
            problem = f"{field}: The PDF document cannot be read: {found.useless}."
            raise FieldError(field, problem)
        return [self.words(kind, at, words_for_pdf(found.useless))]

    def part(self, part: Json | None, kind: str, at: str, *, new: bool) -> Json:
        """Return a part of a chat, which is valid or None, if the model can read it."""
        if part and (new or part["type"] == "text" or self.reading.takes(part)):
            return part
        return self.words(kind, at)


def readable(
    body: Mapping[str, Any], reading: Readable
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the body of a chat whose history a model can read, and the replaced parts.

    Raise `FieldError` for a PDF of this turn that cannot be read.
    """
    messages = body["messages"]
    roles = [one.get("role") if isinstance(one, Mapping) else None for one in messages]
    turn = last_turn(roles)
    changed: dict[int, list[Any]] = {}
    replacements = Replacements(reading)
    for index, content in _contents(messages):
        new = index > turn and roles[index] != "tool"
        parts = _readable_parts(content, f"messages[{index}].content", replacements, new=new)
        if roles[index] == "tool":  # templates take pictures of pages from users alone
            del parts[len(content) :]
        if parts != content:
            changed[index] = parts
    _limit_pictures(messages, roles, changed, turn, replacements)
    if not changed:
        return body, ()
    kept = [
        {**message, "content": changed[index]} if index in changed else message
        for index, message in enumerate(messages)
    ]
    return {**body, "messages": kept}, tuple(replacements.replaced)


def _contents(messages: Sequence[Any]) -> list[tuple[int, list[Any]]]:
    """Return the content of each message that has parts, with its index."""
    contents = [one.get("content") if isinstance(one, Mapping) else None for one in messages]
    return [(index, one) for index, one in enumerate(contents) if isinstance(one, list)]


def _limit_pictures(
    messages: Sequence[Any],
    roles: Sequence[Any],
    changed: dict[int, list[Any]],
    turn: int,
    replacements: Replacements,
) -> None:
    """Replace the oldest pictures of the history, if those of the request are too many.

    Eight at a time, so that the next pictures do not change the beginning of the prompt again. New
    pictures of tools, also in the user's message after their results, are history too.
    """
    reading = replacements.reading
    found = [
        (index, place, part, pixels_of(part))
        for index, content in _contents(messages)
        for place, part in enumerate(changed.get(index, content))
        if isinstance(part, Mapping) and MEDIA_KINDS.get(str(part.get("type"))) == "image"
    ]
    pixels = sum(size for *_, size in found)
    first = 0
    while first < len(found) and (len(found) - first > reading.pictures or pixels > reading.pixels):
        pixels -= sum(size for *_, size in found[first : first + _PICTURES_STEP])
        first += _PICTURES_STEP
    for index, place, part, _ in found[:first]:
        if index <= turn or "tool" in roles[max(index - 1, 0) : index + 1]:
            parts = changed.setdefault(index, [*messages[index]["content"]])
            parts[place] = replacements.words(part["type"], f"messages[{index}].content[{place}]")


def _readable_parts(
    content: Sequence[Any], where: str, replacements: Replacements, *, new: bool
) -> list[Any]:
    """Return the parts of a content, each at its place, then the pages of its documents."""
    parts: list[Any] = []
    pages: list[Any] = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            parts.append(part)
        elif kind == "file" and (pdf := pdf_of(part)) is not None:
            name, field = part["file"].get("filename"), f"{at}.file.file_data"
            text, *pictures = replacements.document(pdf, name, kind, at, field, new=new)
            parts.append(text)
            pages += pictures
        elif new or kind in TEXT_PARTS:
            parts.append(part)
        else:
            media = part if kind in MEDIA_KINDS else None
            parts.append(replacements.part(media, kind, at, new=False))
    return [*parts, *pages]
