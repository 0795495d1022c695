"""What stands in for the parts of a history that no model can read.

A client sends its history again with each turn, so a part that is refused ends the conversation for
good. Such a part becomes a line of words in its place, and the response names it in a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from policies.request.content import MEDIA_KINDS, TEXT_PARTS, source_of

Json = dict[str, Any]

_KIND_CHARS = 100
_SAFE = "._-[]"


def words_for(kind: str) -> str:
    """Return the words in place of a part of this type."""
    return f"[Here was a part of the type '{kind[:_KIND_CHARS]}', which this model cannot read.]"


def named(place: str, kind: str) -> str:
    """Return the place and the type of a part as a header can have them."""
    return f"{place}:{quote(kind[:_KIND_CHARS], safe=_SAFE)}"


def readable(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the body of a chat whose history a model can read, and what words replace in it.

    What the user says in this turn stays: if no model can read it, the request is refused.
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
        if not isinstance(content, list) or (index > turn and roles[index] != "tool"):
            continue
        for place, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and not _is_readable(part, kind):
                parts = changed.setdefault(index, [*content])
                parts[place] = {"type": "text", "text": words_for(kind)}
                replaced.append(named(f"messages[{index}].content[{place}]", kind))
    if not changed:
        return body, ()
    kept = [
        {**message, "content": changed[index]} if index in changed else message
        for index, message in enumerate(messages)
    ]
    return {**body, "messages": kept}, tuple(replaced)


def _is_readable(part: Mapping[str, Any], kind: str) -> bool:
    if kind in TEXT_PARTS:
        return True
    if kind not in MEDIA_KINDS:
        return False
    source = source_of(part)[1]
    return source is None or MEDIA_KINDS[kind] == "file" or source.startswith("data:")
