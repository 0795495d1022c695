"""A load generator for OpenAI endpoints: prompts, load, measurements and reports."""

from __future__ import annotations

import json
from typing import Any


class MeasurementError(Exception):
    """Nothing can be measured; the message is one sentence that names the necessary change."""


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return a JSON object, or None for any other text."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
