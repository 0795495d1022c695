"""Read one PDF from the standard input; write its pages as lines of JSON.

Nobody knows what a stranger's PDF does to the libraries that read it, so this process has limits on
its time and memory and no secrets, and writes each line as soon as it is known, so that pages
before a limit count.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import os
import resource
import signal
import struct
import sys
import threading
import time
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, Final

INPUT_LIMIT_BYTES: Final = 32 << 20
PICTURE: Final = "data:image/png;base64,"
"""The first bytes of each picture."""
PAGE_PX: Final = 1024
"""The longer side of the picture of a page."""
MEMORY_LIMIT_BYTES: Final = 512 << 20
_ADDRESSES_LIMIT_BYTES: Final = 1 << 30
_CPU_S: Final = 15
WALL_S: Final = 300
"""On a machine that is busy with others; on an idle one the CPU time ends first."""
TEXT_CPU_S: Final = 6.0
_PAGES_CPU_S: Final = 10.0
TEXT_LIMIT_CHARS: Final = 500_000
TEXT_LIMIT_PAGES: Final = 500
_CHECK_S: Final = 0.01
_NICENESS: Final = 10
_SIDES_LIMIT: Final = 20


def _limit() -> None:
    """Limit this process, before it reads or imports anything."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it writes to pipes alone
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))
    os.nice(_NICENESS)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(2 * WALL_S)  # the gateway that started it may be gone
    if sys.platform == "linux":
        # A Mac counts the libraries of the system as well, and may refuse any limit.
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES_LIMIT_BYTES, _ADDRESSES_LIMIT_BYTES))
    threading.Thread(target=_watch_memory, daemon=True).start()


def _watch_memory() -> None:
    limit = max(MEMORY_LIMIT_BYTES, _peak_bytes())
    while _peak_bytes() <= limit:
        time.sleep(_CHECK_S)
    os._exit(os.EX_UNAVAILABLE)


def _peak_bytes() -> int:
    """Return the most memory that this process has had."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # There, the usage of resources begins with that of the gateway, which has forked.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def _write(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _write_text(content: bytes) -> bool:
    """Write the text of each page; return whether the document can be read."""
    from pypdf import PasswordType, PdfReader  # noqa: PLC0415  # after the limits

    reader = PdfReader(BytesIO(content))
    if reader.is_encrypted and reader.decrypt("") is PasswordType.NOT_DECRYPTED:
        _write(problem="it is encrypted")
        return False
    count = len(reader.pages)
    if not count:
        _write(problem="it has no pages")
        return False
    _write(page_count=count)
    chars, ends_s = 0, time.process_time() + TEXT_CPU_S
    for number in range(count):
        if number >= TEXT_LIMIT_PAGES or chars >= TEXT_LIMIT_CHARS or time.process_time() > ends_s:
            return True
        text = reader.pages[number].extract_text().strip()
        # A text that no encoding takes would break the body that it becomes a part of.
        text = text.encode(errors="replace").decode()[: TEXT_LIMIT_CHARS - chars]
        chars += len(text)
        _write(text=text)
    _write(whole=chars < TEXT_LIMIT_CHARS)
    return True


def _write_pages(content: bytes, limit: int) -> None:
    """Write the pictures of the first pages."""
    from pypdfium2 import PdfDocument  # noqa: PLC0415

    ends_s = time.process_time() + _PAGES_CPU_S
    for page in itertools.islice(PdfDocument(content), limit):
        shorter, longer = sorted(page.get_size())
        if time.process_time() > ends_s or not 0 < longer < shorter * _SIDES_LIMIT:
            return
        bitmap = page.render(scale=PAGE_PX / longer, rev_byteorder=True)
        if bitmap.n_channels != 3:
            return
        row_bytes = bitmap.width * 3
        rows = memoryview(bitmap.buffer).cast("B")
        starts = range(0, bitmap.height * bitmap.stride, bitmap.stride)
        lines = b"".join(b"\0" + rows[start : start + row_bytes] for start in starts)
        picture = _png(bitmap.width, bitmap.height, lines)
        _write(picture=PICTURE + base64.b64encode(picture).decode())


def _png(width_px: int, height_px: int, lines: bytes) -> bytes:
    """Return the PNG file of lines of RGB, each behind the number of its filter."""
    header = struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def main(pages: int) -> None:
    """Read the PDF and write its text, with its first pages as pictures."""
    _limit()
    logging.disable()
    content = sys.stdin.buffer.read(INPUT_LIMIT_BYTES)
    try:
        readable = _write_text(content)
    except Exception:  # noqa: BLE001  # any bytes of a client
        # Its pages may be readable all the same.
        readable = True
    if readable and pages:
        with contextlib.suppress(Exception):
            _write_pages(content, pages)
    _write(ended=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
