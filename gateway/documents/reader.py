"""Read PDFs, each in a process of its own, and remember them: a history comes with each turn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

from pydantic_core import from_json

from gateway.documents import pdf_process
from gateway.memory_budget import MemoryBudget, MemoryHold
from gateway.protocols.documents import UNREAD, Document
from paceline.request.content import decode_base64

log = logging.getLogger(__name__)

PAGES_LIMIT = 8
"""The pages of one document that become pictures."""
REQUEST_PAGES_LIMIT = 16
"""Those of all documents of one request; a request may have pictures of its own."""
_NEW_LIMIT = 16
"""Documents that are read for one request."""
_NEW_LIMIT_BYTES = 64 * 1024 * 1024
_PROCESSES = 2
"""At a time; a client has one of them."""
_REQUEST_S = float(pdf_process.WALL_S)
"""For all documents of a request; the next request continues."""
_CACHE_BYTES = 64 * 1024 * 1024
_OUTPUT_LIMIT_BYTES = 64 * 1024 * 1024
_FORMS = 3
"""As lines of the process, parsed, and in the body for a worker."""
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""The rest may hold secrets."""
_DAMAGED = Document(problem="it is damaged")
_TOO_LARGE = Document(problem="it is too large")
_UNREAD = Document(problem=UNREAD)


class DocumentReader:
    """Reads the PDFs of requests. A client's documents wait for each other."""

    def __init__(self, memory: MemoryBudget) -> None:
        self._processes = asyncio.Semaphore(_PROCESSES)
        self._clients: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._read: OrderedDict[tuple[bytes, bool], Document] = OrderedDict()
        """By digest, with pictures of their pages or without; the last used is the last."""
        self._remembered = memory.hold("documents")  # they are of no client alone
        self.started = 0
        """Processes since the start."""

    async def read(
        self, hold: MemoryHold, pdfs: Sequence[str], *, pictures: bool
    ) -> Mapping[str, Document]:
        """Return the documents of a request by their base64 texts.

        `hold` gets the bytes of their contents while they are read, and of the result.
        """
        found: dict[str, Document] = {}
        new = new_bytes = 0
        now_s = asyncio.get_running_loop().time
        ends_s = now_s() + _REQUEST_S
        for pdf in dict.fromkeys(pdfs):
            with hold.another() as reading:
                reading.add(_FORMS * len(pdf))
                content = b""
                with contextlib.suppress(ValueError):
                    content = await asyncio.to_thread(decode_base64, pdf)
                if not content:
                    found[pdf] = _DAMAGED
                    continue
                if len(content) > pdf_process.INPUT_LIMIT_BYTES:
                    found[pdf] = _TOO_LARGE
                    continue
                key = (await asyncio.to_thread(sha256, content)).digest(), pictures
                document = self._known(key)
                if document is None:
                    new, new_bytes = new + 1, new_bytes + len(content)
                    if new > _NEW_LIMIT or new_bytes > _NEW_LIMIT_BYTES or now_s() > ends_s:
                        document = _UNREAD
                    else:
                        document = await self._read_new(reading, key, content)
            hold.add(_FORMS * document.size_bytes)
            found[pdf] = document
        return _within_pages(pdfs, found)

    def _known(self, key: tuple[bytes, bool]) -> Document | None:
        if (document := self._read.get(key)) is not None:
            self._read.move_to_end(key)
        return document

    async def _read_new(
        self, hold: MemoryHold, key: tuple[bytes, bool], content: bytes
    ) -> Document:
        lock = self._clients.setdefault(hold.client, asyncio.Lock())
        async with lock, self._processes:
            # Another request may have brought it meanwhile.
            if (document := self._known(key)) is not None:
                return document
            try:
                document, ended = await self._run(hold, content, PAGES_LIMIT if key[1] else 0)
            except OSError as error:
                log.warning("document.unread error=%r", error)
                return _UNREAD
            if ended:  # else the machine is busy, and a later turn may get more of it
                self._read[key] = document
                self._remembered.count(document.size_bytes)
                while self._remembered.size_bytes > _CACHE_BYTES:
                    _, oldest = self._read.popitem(last=False)
                    self._remembered.count(-oldest.size_bytes)
            return document

    async def _run(self, hold: MemoryHold, content: bytes, pages: int) -> tuple[Document, bool]:
        """Read a document in a process of its own, which ends with this call.

        Return also whether the process ended by itself, or by its own limits.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", pdf_process.__name__, str(pages)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal of a gateway is not for it
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        read = process.stdout.read
        self.started += 1
        output = bytearray()
        ended = False
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(pdf_process.WALL_S):
                    process.stdin.write(content)
                    process.stdin.write_eof()
                    while len(output) < _OUTPUT_LIMIT_BYTES and (piece := await read(1 << 20)):
                        hold.add(_FORMS * len(piece))
                        output += piece
                    ended = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        try:
            return await asyncio.to_thread(_document_of, bytes(output)), ended
        except (ValueError, TypeError, AttributeError):  # of a process that a document has taken
            return _DAMAGED, True


def _document_of(output: bytes) -> Document:
    """Return the document in the lines of a process; the last one may be incomplete."""
    texts: list[str] = []
    pages: list[str] = []
    known: dict[str, Any] = {}
    for line in output.split(b"\n")[:-1]:
        told = from_json(line)
        if "text" in told:
            texts.append(told["text"])
        elif "picture" in told:
            pages.append(told["picture"])
        else:
            known |= told
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    if not all(page.startswith(pdf_process.PICTURE) for page in pages):
        raise ValueError
    if "problem" in known:
        return Document(problem=known["problem"])
    if not (texts or pages):
        return _DAMAGED if "ended" in known else Document(problem="it takes too long to read")
    text = "\n\n".join(f"[Page {at}]\n{text}" for at, text in enumerate(texts, 1) if text)
    count = known.get("page_count", len(pages))
    return Document(text, count, tuple(pages), whole=known.get("whole", False))


def _within_pages(pdfs: Sequence[str], found: dict[str, Document]) -> Mapping[str, Document]:
    """Return the documents with the pictures that a request may have, of the first ones first.

    Later turns have the same ones, so that the beginning of their prompt stays.
    """
    room = REQUEST_PAGES_LIMIT
    for pdf in pdfs:
        if len(found[pdf].pages) > room:
            found[pdf] = found[pdf]._replace(pages=())
        room -= len(found[pdf].pages)
    return found
