"""The plot of a sweep: one self-contained SVG without scripts, with light and dark colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from operator import itemgetter
from typing import Final, NamedTuple

from gateway.loadgen.report import POSITIONS, medians_by_load
from gateway.loadgen.runner import Measurement

_PANEL: Final = (400, 250)
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 326, 34, 216
"""The plotted part of a panel; around it are the title, numbers, levels and names of lines."""
_HEAD: Final = 56
_LABEL_HEIGHT: Final = 13
_STYLE: Final = """
text { font: 11px system-ui, sans-serif; fill: #374151; }
.page { fill: #ffffff; } .head { font-size: 16px; font-weight: 600; } .title { font-weight: 600; }
.grid { stroke: #e5e7eb; } .line { fill: none; stroke: currentColor; stroke-width: 2; }
.dot, .name { fill: currentColor; } .dashed { stroke-dasharray: 5 4; }
.a { color: #2563eb; } .b { color: #d97706; }
@media (prefers-color-scheme: dark) {
  text { fill: #d1d5db; } .page { fill: #111827; } .grid { stroke: #374151; }
  .a { color: #60a5fa; } .b { color: #fbbf24; }
}
"""
_LINES: Final = {
    "Output tokens per second": {"": "output_throughput"},
    "Time to first token, ms": {"p50": "median_ttft_ms", "p99": "p99_ttft_ms"},
    "Time per output token, ms": {"p50": "median_tpot_ms", "p99": "p99_tpot_ms"},
}
"""For each panel, the labels of its lines, with their figures; lines after the first are dashed."""


class _Line(NamedTuple):
    label: str
    kind: str
    """The classes of its style."""
    values: list[float | None]
    """One per level; None if it was not measured."""


def svg(measurements: Sequence[Measurement], *, endpoints: Sequence[str]) -> str:
    """Return a plot of throughput, latency and acceptance by load; `endpoints` names A and B."""
    levels = list(dict.fromkeys(measured.level for measured in measurements))
    loads = [f"{level.concurrency or level.rate:g}" for level in levels]
    axis = "concurrent requests" if levels[0].concurrency else "requests per second"
    results = medians_by_load(measurements)
    positions: dict[str, str] = {}
    for figures in results.values():
        for position, rate in enumerate(figures.get(POSITIONS, ())):
            positions[f"position {position}"] = f"position {position}"
            figures[f"position {position}"] = 100 * rate
    letters = "AB"[: len(endpoints)]
    width, height = 2 * _PANEL[0], _HEAD + 2 * _PANEL[1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img"><style>{_STYLE}</style>',
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="head" x="16" y="26">paceline bench, over {axis}</text>',
    ]
    for place, (letter, name) in enumerate(zip(letters, endpoints, strict=True)):
        shown = escape(f"{letter}: {name}" if len(endpoints) > 1 else name)
        x = 16 + place * _PANEL[0]
        parts.append(f'<text class="name {letter.lower()}" x="{x}" y="46">{shown}</text>')
    panels = {**_LINES, "Accepted drafts by position, %": positions}
    for place, (title, names) in enumerate(panels.items()):
        lines = [
            _Line(
                label=f"{letter} {label}".strip() if len(endpoints) > 1 else label,
                kind=f"{letter.lower()} dashed" if index else letter.lower(),
                values=[results.get((level, letter), {}).get(name) for level in levels],
            )
            for letter in letters
            for index, (label, name) in enumerate(names.items())
        ]
        x, y = place % 2 * _PANEL[0], _HEAD + place // 2 * _PANEL[1]
        parts += [f'<g transform="translate({x} {y})">', *_panel(title, loads, lines), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _panel(title: str, loads: Sequence[str], lines: Sequence[_Line]) -> Iterator[str]:
    measured = [value for line in lines for value in line.values if value is not None]
    yield f'<text class="title" x="{_LEFT}" y="18">{title}</text>'
    if not measured:
        yield f'<text x="{_LEFT}" y="{_TOP + 20}">no data</text>'
        return
    ticks = _ticks(max(measured))
    scale = (_BOTTOM - _TOP) / ticks[-1]
    for tick in ticks:
        y = _BOTTOM - tick * scale
        yield f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    xs = [_LEFT + (place + 0.5) * (_RIGHT - _LEFT) / len(loads) for place in range(len(loads))]
    for x, load in zip(xs, loads, strict=True):
        yield f'<text x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{load}</text>'
    ends: list[tuple[float, _Line]] = []
    for line in lines:
        points = [
            (x, _BOTTOM - value * scale)
            for x, value in zip(xs, line.values, strict=True)
            if value is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="line {line.kind}" points="{path}"/>'
        for x, y in points:
            yield f'<circle class="dot {line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        ends += [(y, line) for _, y in points[-1:]]
    # Each name is next to the end of its line, without overlaps.
    free = -math.inf
    for y, line in sorted(ends, key=itemgetter(0)):
        free = max(y + 4, free + _LABEL_HEIGHT)
        yield f'<text class="name {line.kind}" x="{_RIGHT + 2}" y="{free:.1f}">{line.label}</text>'


def _ticks(highest: float) -> list[float]:
    """Return four to six round numbers from 0 to just above the highest value."""
    if not highest:
        return [0, 1]
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough)
    return [step * tick for tick in range(math.ceil(highest / step) + 1)]
