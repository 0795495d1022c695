"""Limits in the headers of answers, as OpenAI writes them."""

from __future__ import annotations

import math

from gateway.types import Headers

Names = tuple[bytes, bytes, bytes]
"""Of the limit, of what is left, and of the time until it is whole again."""
OF_REQUESTS: Names = (
    b"x-ratelimit-limit-requests",
    b"x-ratelimit-remaining-requests",
    b"x-ratelimit-reset-requests",
)
OF_TOKENS: Names = (
    b"x-ratelimit-limit-tokens",
    b"x-ratelimit-remaining-tokens",
    b"x-ratelimit-reset-tokens",
)


def limit_headers(names: Names, limit: int, left: int, full_in_s: float) -> Headers:
    """Tell a limit, what is left of it, and when it is whole again."""
    of_limit, of_left, of_reset = names
    return [
        (of_limit, b"%d" % limit),
        (of_left, b"%d" % left),
        (of_reset, _duration(full_in_s)),
    ]


def _duration(seconds: float) -> bytes:
    """Write a duration as OpenAI does: 120ms, 8s, 6m0s, 3h2m1s; never shorter than it is."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    whole = math.ceil(seconds)
    if whole < 60:
        return b"%ds" % whole
    if whole < 3600:
        return b"%dm%ds" % divmod(whole, 60)
    return b"%dh%dm%ds" % (whole // 3600, whole % 3600 // 60, whole % 60)
