"""Pictures for requests, and headers with any size."""

import base64
import struct
import zlib
from io import BytesIO
from typing import Any

from PIL import Image


def encode_image(image: Image.Image, kind: str = "png", **options: Any) -> str:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return data_url(buffer.getvalue(), kind)


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def png_header(width_px: int, height_px: int) -> bytes:
    """Return a PNG header that claims this size, without pixels."""
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    checksum = struct.pack(">I", zlib.crc32(ihdr))
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + ihdr + checksum + b"\0\0\0\x0aIDAT"
