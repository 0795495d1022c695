"""The pictures of requests, decoded within the memory that is left for them."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Self

from PIL import Image, ImageOps

from paceline.request.content import PIXELS_LIMIT, PictureInvalid, content_of, decode_base64
from workers.engine.types import Picture
from workers.server.errors import BadRequest, PictureMemoryFull

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MEMORY_SHARE = 8
"""An eighth of the memory of MLX is for pictures; the engine's estimate leaves a tenth free."""
_PIXEL_BYTES = 8
"""RGB for as long as its request runs, and RGBA while the model's processor reads it."""


class PictureMemory:
    """Decodes pictures, and counts the pixels of each for as long as it is in memory.

    One request decodes at a time: meanwhile its pictures take several times as much memory.
    """

    def __init__(self, limit_pixels: int = PIXELS_LIMIT) -> None:
        self._free_pixels = limit_pixels
        self._decoding = asyncio.Lock()
        # Reentrant: the garbage collector may release a picture while this thread reserves one.
        self._lock = threading.RLock()

    @classmethod
    def within(cls, memory_bytes: int) -> Self:
        """Return a limit for this much memory; the pictures of one request always fit."""
        return cls(max(PIXELS_LIMIT, memory_bytes // _MEMORY_SHARE // _PIXEL_BYTES))

    async def decode(self, sources: Sequence[tuple[str, str]]) -> tuple[Picture, ...]:
        """Decode (field, URL) pairs in order, in a thread.

        Raise `BadRequest` naming the field, or `PictureMemoryFull` while other requests hold it.
        """
        async with self._decoding:
            return await asyncio.to_thread(self._decode, sources)

    def _decode(self, sources: Sequence[tuple[str, str]]) -> tuple[Picture, ...]:
        """Decode pictures after the headers of all: a picture that is too large is not decoded."""
        images: deque[tuple[str, Image.Image]] = deque()
        pixels_left = PIXELS_LIMIT
        for param, url in sources:
            with _naming(param):
                content = BytesIO(decode_base64(content_of(url)))
                image = Image.open(content, formats=_FORMATS)  # reads the header only
                pixels_left -= image.width * image.height
                if pixels_left < 0:
                    raise Image.DecompressionBombError
            images.append((param, image))
        pictures = []
        while images:  # each is dropped once it is decoded
            pictures.append(self._read_pixels(*images.popleft()))
        return tuple(pictures)

    def _read_pixels(self, param: str, image: Image.Image) -> Picture:
        """Reserve memory for the pixels, which the end of the picture releases, and decode them."""
        pixels = image.width * image.height
        with self._lock:
            if pixels > self._free_pixels:
                raise PictureMemoryFull
            self._free_pixels -= pixels
        try:
            with _naming(param), image:
                ImageOps.exif_transpose(image, in_place=True)
                rgb = image if image.mode == "RGB" else image.convert("RGB")
                picture = Picture(width_px=rgb.width, height_px=rgb.height, rgb=rgb.tobytes())
        except BaseException:
            self._release(pixels)
            raise
        weakref.finalize(picture, self._release, pixels).atexit = False
        return picture

    def _release(self, pixels: int) -> None:
        with self._lock:
            self._free_pixels += pixels


@contextlib.contextmanager
def _naming(param: str) -> Iterator[None]:
    """Raise errors of a picture as `BadRequest` that names its field."""
    try:
        yield
    except PictureInvalid as error:
        raise BadRequest(str(error), param=param) from None
    except binascii.Error as error:
        raise BadRequest("The image is not valid base64.", param=param) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadRequest(
            f"The images of a request may have at most {PIXELS_LIMIT} pixels in all.", param=param
        ) from error
    except Exception as error:  # a hostile file makes decoders raise nearly anything
        raise BadRequest("The image cannot be decoded.", param=param) from error
