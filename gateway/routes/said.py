"""What admins say of themselves and their edits, in headers."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from starlette.requests import Request

from gateway.api.auth import way_in
from gateway.client import header
from gateway.errors import FieldInvalid
from gateway.routes.documented import parameter

AUTHOR_HEADER = "x-paceline-author"
NOTE_HEADER = "x-paceline-note"
AUTHOR = parameter(AUTHOR_HEADER, "header", "Who edits; percent-encoded.")

_AUTHOR_CHARS = 100
_NOTE_CHARS = 500


def read_author(request: Request) -> str:
    """Read who edits, as they say themselves; else how they came in."""
    return _said(request, AUTHOR_HEADER, _AUTHOR_CHARS) or way_in(request)


def read_note(request: Request) -> str:
    """Read what an edit is for; empty where nothing is said."""
    return _said(request, NOTE_HEADER, _NOTE_CHARS)


def _said(request: Request, name: str, limit_chars: int) -> str:
    """Read text that a person wrote: UTF-8, and what is not ASCII percent-encoded or not."""
    try:
        said = unquote_to_bytes(header(request.scope, name.encode()) or b"").decode().strip()
    except UnicodeDecodeError:
        said = "\0"
    # It is shown on terminals, where other characters move the cursor.
    if not said.isprintable() or len(said) > limit_chars:
        raise FieldInvalid(
            f"'{name}' must be one line of at most {limit_chars} characters in UTF-8, those that "
            "are not ASCII percent-encoded.",
            param=name,
        )
    return said
