"""The parts of a chat for a PDF: its text, and its pages as pictures if the model reads them.

Another module reads the PDFs before translation, because a pure function cannot wait.
"""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gateway.types import Json
from paceline.request.content import (
    MEDIA_KINDS,
    PICTURES_LIMIT,
    PIXELS_LIMIT,
    PictureInvalid,
    file_fault,
    read_size,
    source_of,
)

UNREAD = "it was not read"
_NO_TEXT = "it contains no text, and this model does not read pictures"
_PDF_URL = "data:application/pdf;base64,"
_PDF_HEAD = "JVBERi0"
"""The base64 text of `%PDF-`."""
PDF_MARKS = (b"application/pdf", b"application\\/pdf", _PDF_HEAD.encode())
"""No body has a PDF without one of these."""
_NAME_CHARS = 200
_ALL_MEDIA = frozenset(MEDIA_KINDS.values())


class Document(NamedTuple):
    """The content of a PDF."""

    text: str = ""
    page_count: int = 0
    pages: tuple[str, ...] = ()
    """The first pages as `data:` URLs of pictures."""
    problem: str = ""
    """Why nothing was read, as the end of a sentence."""
    whole: bool = True
    """Whether the text is that of the whole document."""

    @property
    def size_bytes(self) -> int:
        """Return the memory that it takes."""
        return len(self.text) * 4 + sum(map(len, self.pages)) + 1000

    @property
    def useless(self) -> str:
        """Return why a model gets nothing of it, as the end of a sentence; empty if it does."""
        return self.problem or ("" if self.text or self.pages else _NO_TEXT)

    def parts(self, name: object = None) -> list[Json]:
        """Return the parts of a chat for it."""
        shown = f" {' '.join(name.split())[:_NAME_CHARS]!r}" if isinstance(name, str) else ""
        text = f"[The text of the PDF document{shown}, {self.page_count} pages:]\n{self.text}"
        if not self.whole:
            text += "\n[The rest of the document is missing.]"
        pictures = [{"type": "image_url", "image_url": {"url": page}} for page in self.pages]
        return [{"type": "text", "text": text}, *pictures]


NO_DOCUMENTS: Mapping[str, Document] = MappingProxyType({})


class Readable(NamedTuple):
    """The media that a model can read, besides text."""

    media: frozenset[str] = _ALL_MEDIA
    """The kinds of media that its workers take."""
    documents: Mapping[str, Document] = NO_DOCUMENTS
    """The PDFs of the request that were read, by their base64 text."""
    pictures: int = PICTURES_LIMIT
    """The most pictures of one request."""
    pixels: int = PIXELS_LIMIT
    """Those of all its pictures together."""
    system_inside: bool = False
    """Its workers say how they render a system message behind others, which so stays one."""

    def takes(self, part: Mapping[str, Any]) -> bool:
        """Return whether the model can read a media part, which is valid; none is a link."""
        kind = MEDIA_KINDS[part["type"]]
        if kind not in self.media or kind == "image":
            return kind in self.media and pixels_of(part) > 0
        if kind == "file":
            return not file_fault(part.get("file"))
        source = source_of(part)[1]
        return source is None or source.startswith("data:")


def pixels_of(picture: Mapping[str, Any]) -> int:
    """Return the size of a picture; 0 if it cannot be read."""
    try:
        return math.prod(read_size(source_of(picture)[1] or ""))
    except PictureInvalid:
        return 0


def pdf_of(block: Mapping[str, Any]) -> str | None:
    """Return the base64 text of a block, part or item if it is a PDF, else None."""
    match block:
        case {"type": "document", "source": {"type": "base64", "data": str() as data}}:
            return data
        case {"type": "file", "file": {"file_data": str() as data}}:
            pass
        case {"type": "input_file", "file_data": str() as data}:
            pass
        case _:
            return None
    if data[: len(_PDF_URL)].lower() == _PDF_URL:
        return data[len(_PDF_URL) :]
    return data if data.startswith(_PDF_HEAD) else None


def pdfs_in(messages: Any) -> Iterator[str]:
    """Yield the base64 text of each PDF in messages or items, in their order."""
    for one in messages if isinstance(messages, list | tuple) else ():
        if isinstance(one, Mapping):
            if (pdf := pdf_of(one)) is not None:
                yield pdf
            for name in ("content", "output"):
                yield from pdfs_in(one.get(name))
