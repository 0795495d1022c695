"""What ends a measurement before it measures anything."""

from __future__ import annotations


class CannotMeasure(Exception):
    """Nothing can be measured; the message is one sentence that says what to change."""
