"""The plot of a sweep: one self-contained SVG without scripts, with light and dark colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from gateway.loadgen.report import medians
from gateway.loadgen.runner import Measurement

_PANEL: Final = (400, 250)
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 74, 34, 34
"""Margins of a panel: numbers, names of lines, title, and levels of load."""
_HEAD: Final = 56
_LABEL_HEIGHT: Final = 13
_STYLE: Final = """
text { font: 11px system-ui, sans-serif; fill: #374151; }
.page { fill: #ffffff; } .head { font-size: 16px; font-weight: 600; } .title { font-weight: 600; }
.grid { stroke: #e5e7eb; } .line { fill: none; stroke-width: 2; }
.a { stroke: #2563eb; } .b { stroke: #d97706; } .dot.a, .name.a { fill: #2563eb; stroke: none; }
.dot.b, .name.b { fill: #d97706; stroke: none; } .dashed { stroke-dasharray: 5 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #d1d5db; } .page { fill: #111827; } .grid { stroke: #374151; }
  .a { stroke: #60a5fa; } .dot.a, .name.a { fill: #60a5fa; }
  .b { stroke: #fbbf24; } .dot.b, .name.b { fill: #fbbf24; }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """One line of a panel; a value is None if it was not measured."""

    name: str
    endpoint: str
    values: tuple[float | None, ...]
    dashed: bool = False


def svg(measurements: Sequence[Measurement], *, endpoints: Sequence[str]) -> str:
    """Return a plot of throughput, latency and acceptance by load; `endpoints` names A and B."""
    levels = list(dict.fromkeys(measured.level for measured in measurements))
    loads = [f"{level.concurrency or level.rate:g}" for level in levels]
    axis = "concurrent requests" if levels[0].concurrency else "requests per second"
    results = {
        letter: [
            medians(
                measured
                for measured in measurements
                if (measured.endpoint, measured.level) == (letter, level)
            )
            for level in levels
        ]
        for letter in "AB"[: len(endpoints)]
    }
    panels = (
        ("Output tokens per second", _lines(results, ("", "output_throughput"))),
        (
            "Time to first token, ms",
            _lines(results, ("p50", "median_ttft_ms"), ("p99", "p99_ttft_ms")),
        ),
        (
            "Time per output token, ms",
            _lines(results, ("p50", "median_tpot_ms"), ("p99", "p99_tpot_ms")),
        ),
        ("Accepted drafts by position, %", _acceptance(results)),
    )
    width, height = 2 * _PANEL[0], _HEAD + 2 * _PANEL[1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img"><style>{_STYLE}</style>',
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="head" x="16" y="26">paceline bench, over {axis}</text>',
        *_legend(endpoints),
    ]
    for place, (title, series) in enumerate(panels):
        x, y = place % 2 * _PANEL[0], _HEAD + place // 2 * _PANEL[1]
        parts.append(f'<g transform="translate({x} {y})">')
        parts.extend(_panel(title, loads, series))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _legend(endpoints: Sequence[str]) -> Iterator[str]:
    for index, (letter, name) in enumerate(zip("AB", endpoints, strict=False)):
        shown = f"{letter}: {name}" if len(endpoints) > 1 else name
        x = 16 + index * _PANEL[0]
        yield f'<text class="name {letter.lower()}" x="{x}" y="46">{escape(shown)}</text>'


def _lines(results: dict[str, list[dict[str, Any]]], *names: tuple[str, str]) -> list[_Series]:
    return [
        _Series(
            name=" ".join(filter(None, (letter if len(results) > 1 else "", title))),
            endpoint=letter,
            values=tuple(figures.get(name) for figures in levels),
            dashed=title == "p99",
        )
        for letter, levels in results.items()
        for title, name in names
    ]


def _acceptance(results: dict[str, list[dict[str, Any]]]) -> list[_Series]:
    series: list[_Series] = []
    for letter, levels in results.items():
        rates = [figures.get("spec_decode_per_position_acceptance_rates", ()) for figures in levels]
        series.extend(
            _Series(
                name=f"{letter if len(results) > 1 else ''} position {position}".strip(),
                endpoint=letter,
                values=tuple(
                    100 * level[position] if position < len(level) else None for level in rates
                ),
                dashed=position > 0,
            )
            for position in range(max(map(len, rates), default=0))
        )
    return series


def _panel(title: str, loads: Sequence[str], series: Sequence[_Series]) -> Iterator[str]:
    measured = [value for line in series for value in line.values if value is not None]
    yield f'<text class="title" x="{_LEFT}" y="18">{title}</text>'
    if not measured:
        yield f'<text x="{_LEFT}" y="{_TOP + 20}">no data</text>'
        return
    ticks = _ticks(max(measured))
    right, bottom = _PANEL[0] - _RIGHT, _PANEL[1] - _BOTTOM
    xs = [_LEFT + (place + 0.5) * (right - _LEFT) / len(loads) for place in range(len(loads))]
    for tick in ticks:
        y = _height(tick, ticks[-1])
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for x, load in zip(xs, loads, strict=True):
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{load}</text>'
    ends: list[tuple[float, _Series]] = []
    for line in series:
        points = [
            (x, _height(value, ticks[-1]))
            for x, value in zip(xs, line.values, strict=True)
            if value is not None
        ]
        if points:
            yield from _polyline(line, points)
            ends.append((points[-1][1], line))
    yield from _names(ends, right)


def _polyline(line: _Series, points: Sequence[tuple[float, float]]) -> Iterator[str]:
    kind = line.endpoint.lower()
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = " dashed" if line.dashed else ""
    yield f'<polyline class="line {kind}{dashed}" points="{path}"/>'
    for x, y in points:
        yield f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _names(ends: Sequence[tuple[float, _Series]], right: float) -> Iterator[str]:
    """Yield the name of each line next to its end, without overlaps."""
    free = -math.inf
    for y, line in sorted(ends, key=lambda end: end[0]):
        free = max(y + 4, free + _LABEL_HEIGHT)
        kind = line.endpoint.lower()
        yield f'<text class="name {kind}" x="{right + 2}" y="{free:.1f}">{line.name}</text>'


def _height(value: float, highest: float) -> float:
    bottom = _PANEL[1] - _BOTTOM
    return bottom - value / highest * (bottom - _TOP)


def _ticks(highest: float) -> list[float]:
    """Return four to six round numbers from 0 to just above the highest value."""
    if not highest:
        return [0, 1]
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough)
    return [step * tick for tick in range(math.ceil(highest / step) + 1)]
