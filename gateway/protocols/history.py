"""What stands in for the parts of a history that no model can read.

A client sends its history again with each turn, so a part that is refused ends the conversation for
good. Such a part becomes a line of words in its place, and the response names it in a header.
"""

from __future__ import annotations

from urllib.parse import quote

_KIND_CHARS = 100
_SAFE = "._-[]"


def words_for(kind: str) -> str:
    """Return the words in place of a part of this type."""
    return f"[Here was a part of the type '{kind[:_KIND_CHARS]}', which this model cannot read.]"


def named(place: str, kind: str) -> str:
    """Return the place and the type of a part as a header can have them."""
    return f"{place}:{quote(kind[:_KIND_CHARS], safe=_SAFE)}"
