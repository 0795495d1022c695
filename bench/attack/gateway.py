"""The gateway under attack, with short limits for stalled clients and silent streams.

`python -m bench.attack.gateway` takes the words of `paceline`. No setting has these limits.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Final

from gateway.assembly import TIMING
from gateway.cli import gateway, main
from gateway.server import serve

LIMIT_S: Final = 3.0
_TIMING: Final = replace(TIMING, head_timeout_s=LIMIT_S, write_timeout_s=LIMIT_S, keepalive_s=0.5)

if __name__ == "__main__":
    vars(gateway)["serve"] = functools.partial(serve, timing=_TIMING)
    sys.exit(main())
