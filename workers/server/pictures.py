"""Pictures out of `data:` URLs; what their headers say was checked when the body was read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from io import BytesIO

from PIL import Image, ImageOps

from policies.request.content import PIXELS_LIMIT, PictureInvalid, content_of
from workers.engine.types import Picture
from workers.server.errors import BadRequest

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def decode_pictures(sources: Sequence[tuple[str, str]]) -> tuple[Picture, ...]:
    """Decode (field, URL) pairs in order; raise `BadRequest` naming the field.

    Takes time in proportion to the pixels: call it off the event loop.
    """
    pixels_left = PIXELS_LIMIT
    pictures = []
    for param, url in sources:
        picture = _decode(param, url, pixels_left)
        pixels_left -= picture.width_px * picture.height_px
        pictures.append(picture)
    return tuple(pictures)


def _decode(param: str, url: str, pixels_left: int) -> Picture:
    try:
        content = base64.b64decode(content_of(url), validate=True)
    except PictureInvalid as error:
        raise BadRequest(str(error), param=param) from None
    except binascii.Error as error:
        raise BadRequest("The picture is not valid base64.", param=param) from error
    try:
        with Image.open(BytesIO(content), formats=_FORMATS) as opened:  # reads the header only
            if opened.width * opened.height > pixels_left:
                raise Image.DecompressionBombError
            upright = ImageOps.exif_transpose(opened).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadRequest(
            f"The pictures of a request may have at most {PIXELS_LIMIT} pixels in all.", param=param
        ) from error
    except Exception as error:  # a hostile file raises nearly anything out of a decoder
        raise BadRequest("The picture cannot be decoded.", param=param) from error
    return Picture(width_px=upright.width, height_px=upright.height, rgb=upright.tobytes())
