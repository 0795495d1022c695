"""What the rules made of the simulated traffic, as one picture: a dot for each in each scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log10
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from bench.fleet.verdicts import Found

# Told apart by people who see fewer colours too (Okabe and Ito).
_COLOURS: Final = ("#d55e00", "#999999", "#56b4e9", "#009e73", "#cc79a7", "#000000")
_LEFT, _TOP, _ROW, _PANEL, _GAP, _DOT, _LETTER = 150, 64, 26, 190, 28, 4.5, 6.6


class _Panel(NamedTuple):
    """One measure; `low` and `high` are the ends of its axis."""

    title: str
    read: Callable[[Found], float]
    low: float
    high: float
    logarithmic: bool = True

    def share(self, found: Found) -> float:
        """Tell how far to the right a dot stands; what is off the axis stands at its end."""
        value = min(max(self.read(found), self.low), self.high)
        if not self.logarithmic:
            return (value - self.low) / (self.high - self.low)
        return log10(value / self.low) / log10(self.high / self.low)


_PANELS: Final = (
    _Panel("found again, %", lambda one: 100 * one.hit_rate, 0, 100, logarithmic=False),
    _Panel("first token p50, s", lambda one: one.wait_s(50), 0.1, 100),
    _Panel("first token p99, s", lambda one: one.wait_s(99), 0.1, 1000),
    _Panel("over its share of load, s", lambda one: one.longest_over_s, 1, 1000),
)


def plotted(scenarios: Mapping[str, Sequence[Found]]) -> str:
    """Draw the rules over all scenarios, as SVG."""
    rules = [one.rule for one in next(iter(scenarios.values()))]
    width = _LEFT + len(_PANELS) * (_PANEL + _GAP)
    height = _TOP + len(scenarios) * _ROW + 34
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    x = 14.0
    for rule, colour in zip(rules, _COLOURS, strict=True):
        drawn += [_dot(x, 16, colour), _text(x + 9, 20, rule)]
        x += 40 + _LETTER * len(rule)
    for row, name in enumerate(scenarios):
        drawn.append(_text(_LEFT - 10, _TOP + row * _ROW + 17, name, anchor="end"))
    for column, panel in enumerate(_PANELS):
        drawn += _panel(panel, _LEFT + column * (_PANEL + _GAP), tuple(scenarios.values()))
    return "\n".join([*drawn, "</svg>\n"])


def _panel(panel: _Panel, x: float, scenarios: Sequence[Sequence[Found]]) -> list[str]:
    bottom = _TOP + len(scenarios) * _ROW
    drawn = [_text(x + _PANEL / 2, _TOP - 10, panel.title, anchor="middle")]
    drawn += [
        f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}" stroke="#ccc"/>'
        for at in (x, x + _PANEL)
    ]
    drawn += [
        _text(x, bottom + 18, f"{panel.low:g}"),
        _text(x + _PANEL, bottom + 18, f"{panel.high:g}", anchor="end"),
    ]
    for row, rules in enumerate(scenarios):
        y = _TOP + (row + 0.5) * _ROW
        drawn.append(f'<line x1="{x}" x2="{x + _PANEL}" y1="{y}" y2="{y}" stroke="#eee"/>')
        # The first rule is ours: on top of the others.
        for found, colour in reversed([*zip(rules, _COLOURS, strict=True)]):
            drawn.append(_dot(x + _PANEL * panel.share(found), y, colour))
    return drawn


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_DOT}" fill="{colour}" fill-opacity="0.85"/>'


def _text(x: float, y: float, said: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'
