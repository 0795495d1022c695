"""Wire formats: one module each, behind the interface of `base`."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.protocols.base import WORKER_PATHS, StreamEncoder, WireFormat
from gateway.protocols.messages import MESSAGES
from gateway.protocols.openai import CHAT, COMPLETIONS

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "MESSAGES",
    "WIRE_FORMATS",
    "WORKER_PATHS",
    "StreamEncoder",
    "WireFormat",
]

WIRE_FORMATS: Mapping[str, WireFormat] = {one.path: one for one in (CHAT, COMPLETIONS, MESSAGES)}
"""By the path at which clients use them."""
