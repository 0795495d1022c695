"""Who asks, for as far as a policy may care: never their words, never their secret."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Asker(NamedTuple):
    """One asker at one moment."""

    key: str = ""
    """The id of the key, never the secret; empty without one."""
    team: str = ""
    headers: Mapping[str, str] = _NO_HEADERS
    """Those that the policy names, in lower case; all others are not kept."""
    minute_of_week: int = 0
    """Local time of the gateway, from Monday 00:00."""


SOMEBODY = Asker()
"""Nothing is known of them."""
