"""Wire formats: one module each, behind the interface of `base`."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.protocols.base import WORKER_PATHS, StreamEncoder, WireFormat
from gateway.protocols.messages import MESSAGES
from gateway.protocols.openai import CHAT, COMPLETIONS
from gateway.protocols.responses import PATH as RESPONSES_PATH

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "MESSAGES",
    "PROXY_PATHS",
    "RESPONSES_PATH",
    "WIRE_FORMATS",
    "WORKER_PATHS",
    "StreamEncoder",
    "WireFormat",
]

WIRE_FORMATS: Mapping[str, WireFormat] = {one.path: one for one in (CHAT, COMPLETIONS, MESSAGES)}
"""By the path at which clients use them."""
PROXY_PATHS = (*WIRE_FORMATS, RESPONSES_PATH)
"""The paths of the data plane; a Responses request has a wire format of its own."""
