"""How fast an admin learns of ten events: on the page, by the command, in the log, in a metric.

`python -m bench.on_call` plays the events with real processes and fails where one is not told
within ten seconds in each of the four places. It takes a picture of a page during each event.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from PIL import Image

from bench.harness.options import parser
from bench.harness.servers import ROOT
from bench.harness.tables import Grid, provenance, report
from bench.on_call.events import EVENTS, PLACES, Event
from bench.on_call.fleet import OnCall, running_fleet

_WITHIN_S: Final = 10.0
_PAUSE_S: Final = 0.2
_PICTURE: Final = ROOT / "docs" / "pages" / "on-call.png"
_PART: Final = (720, 480)
Seen = dict[str, float]
"""Seconds after which a place told an event; a place that did not is missing."""


async def _watch(event: Event, fleet: OnCall, log_byte: int, began_s: float) -> Seen:
    """Look at all four places until each tells the event, or the time is over."""
    looks: dict[str, Callable[[], Awaitable[str]]] = {
        "page": lambda: fleet.read_page(event.path),
        "command": lambda: fleet.run_command(event.arguments),
        "log": lambda: fleet.read_log(log_byte),
        "metric": fleet.read_metrics,
    }
    seen: Seen = {}

    async def look(place: str) -> None:
        while True:
            with contextlib.suppress(Exception):  # the gateway may be away
                text = await looks[place]()
                if re.search(event.pattern(place), text, re.DOTALL):
                    seen[place] = time.monotonic() - began_s
                    return
            await asyncio.sleep(_PAUSE_S)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WITHIN_S):
            await asyncio.gather(*map(look, PLACES))
    return seen


async def _play(event: Event, fleet: OnCall) -> tuple[Seen, bytes]:
    with contextlib.suppress(Exception):
        await fleet.read_page(event.path)  # it is open before, as that of whoever is on call
    log_byte = fleet.log_size()
    async with event.happening(fleet):
        seen = await _watch(event, fleet, log_byte, time.monotonic())
        return seen, await fleet.take_picture(event.pictured or event.path)


async def _play_all(
    chosen: tuple[Event, ...], home: Path
) -> tuple[list[tuple[str, Seen]], list[bytes]]:
    found, pictures = [], []
    async with running_fleet(home) as fleet:
        for event in chosen:
            seen, picture = await _play(event, fleet)
            print(f"{event.name}: {seen}", file=sys.stderr)
            found.append((event.name, seen))
            pictures.append(picture)
    return found, pictures


def sheet_of(pictures: list[bytes]) -> Image.Image:
    """Return one picture of all, in two columns and the order of the events."""
    width, height = _PART
    sheet = Image.new("RGB", (2 * width, (len(pictures) + 1) // 2 * height), "white")
    for number, content in enumerate(pictures):
        part = Image.open(io.BytesIO(content)).convert("RGB").resize(_PART)
        sheet.paste(part, (number % 2 * width, number // 2 * height))
    return sheet.quantize(64)


def grid_of(found: list[tuple[str, Seen]]) -> Grid:
    rows = [
        (name, *(f"{seen[place]:.1f} s" if place in seen else "NO" for place in PLACES))
        for name, seen in found
    ]
    return Grid(f"Told within {_WITHIN_S:.0f} s", ("", *PLACES), rows)


def main() -> int:
    made = parser("on_call", __doc__)
    made.add_argument("--only", default="", help="words of the names of events, comma-separated")
    options = made.parse_args()
    words = options.only.split(",")
    chosen = tuple(one for one in EVENTS if any(word in one.name for word in words))
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as home:
        found, pictures = asyncio.run(_play_all(chosen, Path(home)))
    about = (
        f"{provenance()}, by `python -m bench.on_call`: one gateway with Redis, two workers of the "
        "demo model and an engine."
    )
    whole = chosen == EVENTS and not options.quick
    report("on_call.md", "On call", about, grid_of(found), write=whole)
    if whole:
        sheet_of(pictures).save(_PICTURE, optimize=True)
    return any(len(seen) < len(PLACES) for _, seen in found)


if __name__ == "__main__":
    sys.exit(main())
