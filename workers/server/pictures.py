"""Pictures out of `data:` URLs, checked from their header before anything is decoded."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from io import BytesIO

from PIL import Image, ImageOps

from workers.engine.requests import Picture
from workers.server.errors import BadRequest

MAX_PICTURE_BYTES = 32 * 1024 * 1024
MAX_PIXELS = 64_000_000
"""Over all pictures of one request: what a small file may unfold to is bounded too."""

_DATA_URL = re.compile(r"data:image/(?:png|jpe?g|webp|gif);base64,", re.IGNORECASE)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def decode_pictures(sources: Sequence[tuple[str, str]]) -> tuple[Picture, ...]:
    """Decode (field, URL) pairs in order; raise `BadRequest` naming the field.

    Takes time in proportion to the pixels: call it off the event loop.
    """
    pixels_left = MAX_PIXELS
    pictures = []
    for param, url in sources:
        picture = _decode(param, url, pixels_left)
        pixels_left -= picture.width_px * picture.height_px
        pictures.append(picture)
    return tuple(pictures)


def _decode(param: str, url: str, pixels_left: int) -> Picture:
    prefix = _DATA_URL.match(url)
    if prefix is None:
        raise BadRequest(
            "A picture must be a 'data:image/png;base64,...' URL (png, jpeg, webp or gif).",
            param=param,
        )
    if len(url) > MAX_PICTURE_BYTES * 4 // 3:
        raise BadRequest(f"A picture may have at most {MAX_PICTURE_BYTES} bytes.", param=param)
    try:
        content = base64.b64decode(url[prefix.end() :], validate=True)
    except binascii.Error as error:
        raise BadRequest("The picture is not valid base64.", param=param) from error
    try:
        with Image.open(BytesIO(content), formats=_FORMATS) as opened:  # reads the header only
            if opened.width * opened.height > pixels_left:
                raise Image.DecompressionBombError
            upright = ImageOps.exif_transpose(opened).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadRequest(
            f"The pictures of a request may have at most {MAX_PIXELS} pixels in all.", param=param
        ) from error
    except Exception as error:  # a hostile file raises nearly anything out of a decoder
        raise BadRequest("The picture cannot be decoded.", param=param) from error
    return Picture(width_px=upright.width, height_px=upright.height, rgb=upright.tobytes())
