"""Coded bodies of requests (RFC 9110, 8.4): gzip, deflate and zstd, decoded in bounded steps.

A few bytes can stand for gigabytes. So a body is decoded as far as its reader asks, who ends at the
limit of a body. Each step runs in a thread, where the codecs hold up nobody.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from starlette.types import Message, Receive, Scope

from paceline.protocol import CONTENT_CODINGS

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

DECODER_BYTES = 256 * 1024
"""Of a decoder, in addition to its window of the last output."""
_STEP_BYTES = 256 * 1024
_THREAD = ThreadPoolExecutor(1, "decode")
_ZSTD: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}  # 8 MiB, as RFC 9659 says
_DECODERS: Final[dict[str, Callable[[int], Any]]] = {
    "gzip": lambda _: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "x-gzip": lambda _: zlib.decompressobj(16 + zlib.MAX_WBITS),
    # Some clients send deflate without zlib's head, whose first byte has an 8.
    "deflate": lambda first: zlib.decompressobj(zlib.MAX_WBITS * (1 if first & 0xF == 8 else -1)),
    "zstd": lambda _: zstd.ZstdDecompressor(options=_ZSTD),
}
"""By coding: the maker of a decoder, given the first byte of a body."""


def coding_of(scope: Scope) -> str:
    """Return the codings of a body with commas between them; empty without any."""
    values = [value for name, value in scope["headers"] if name == b"content-encoding"]
    codings = (one.strip() for one in b",".join(values).decode("latin-1").lower().split(","))
    return ", ".join(one for one in codings if one not in ("", "identity"))


def decoding(
    receive: Receive,
    coding: str,
    limit_bytes: int,
    *,
    unsupported: Callable[[str], Exception],
    invalid: Callable[[str], Exception],
    too_large: Callable[[int], Exception],
) -> Receive:
    """Return a receiver that decodes a body by parts, one step for each message.

    Raise `unsupported` for another coding, or for several. `limit_bytes` bounds the coded body,
    which may decode to almost nothing.
    """
    if coding not in _DECODERS:
        raise unsupported(
            f"'Content-Encoding' must be one of: {CONTENT_CODINGS}. It is '{coding[:100]}'."
        )

    async def messages() -> AsyncIterator[Message]:
        decoder: Any = None
        coded_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                yield message
                return
            part, more = message.get("body", b""), message.get("more_body", False)
            coded_bytes += len(part)
            if coded_bytes > limit_bytes:
                raise too_large(limit_bytes)
            full = False
            while part or full:
                decoder = decoder or _DECODERS[coding](part[0])
                if decoder.eof:
                    raise invalid(f"The body continues after its {coding} data.")
                try:
                    run = asyncio.get_running_loop().run_in_executor
                    piece = await run(_THREAD, decoder.decompress, part, _STEP_BYTES)
                except (zlib.error, zstd.ZstdError) as error:
                    larger = ", or has a window of more than 8 MiB" * (coding == "zstd")
                    raise invalid(f"The body is not valid {coding} data{larger}.") from error
                part = decoder.unused_data or getattr(decoder, "unconsumed_tail", b"")
                full = len(piece) == _STEP_BYTES and not decoder.eof
                yield {"type": "http.request", "body": piece, "more_body": True}
        if decoder is not None and not decoder.eof:
            raise invalid(f"The body ends before its {coding} data do.")
        yield {"type": "http.request", "body": b"", "more_body": False}

    return messages().__anext__
