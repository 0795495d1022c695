"""Results of the rules on the simulated traffic as a plot: one dot per rule and scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log10
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from bench.fleet.results import RuleResult

# Distinguishable with colour blindness (Okabe and Ito).
_COLOURS: Final = ("#d55e00", "#999999", "#56b4e9", "#009e73", "#cc79a7", "#000000")
_LEFT, _TOP, _ROW, _PANEL, _GAP, _DOT, _LETTER = 190, 64, 26, 190, 28, 4.5, 6.6


class _Panel(NamedTuple):
    """A metric; `low` and `high` are the limits of its axis."""

    title: str
    read: Callable[[RuleResult], float]
    low: float
    high: float
    logarithmic: bool = True

    def share(self, result: RuleResult) -> float:
        """Return the position of a dot on the axis, from 0 to 1; clip values beyond it."""
        value = min(max(self.read(result), self.low), self.high)
        if not self.logarithmic:
            return (value - self.low) / (self.high - self.low)
        return log10(value / self.low) / log10(self.high / self.low)


_PANELS: Final = (
    _Panel("cached, %", lambda result: 100 * result.hit_rate, 0, 100, logarithmic=False),
    _Panel("first token p50, s", lambda result: result.wait_s(50), 0.1, 100),
    _Panel("first token p99, s", lambda result: result.wait_s(99), 0.1, 1000),
    _Panel("over its share of load, s", lambda result: result.longest_over_s, 1, 1000),
)


def svg(scenarios: Mapping[str, Sequence[RuleResult]]) -> str:
    """Return the plot of all rules and scenarios as SVG."""
    rules = [result.rule for result in next(iter(scenarios.values()))]
    width = _LEFT + len(_PANELS) * (_PANEL + _GAP)
    height = _TOP + len(scenarios) * _ROW + 34
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    x = 14.0
    for rule, colour in zip(rules, _COLOURS, strict=True):
        elements += [_dot(x, 16, colour), _text(x + 9, 20, rule)]
        x += 40 + _LETTER * len(rule)
    for row, name in enumerate(scenarios):
        elements.append(_text(_LEFT - 10, _TOP + row * _ROW + 17, name, anchor="end"))
    for column, panel in enumerate(_PANELS):
        elements += _panel(panel, _LEFT + column * (_PANEL + _GAP), tuple(scenarios.values()))
    return "\n".join([*elements, "</svg>\n"])


def _panel(panel: _Panel, x: float, scenarios: Sequence[Sequence[RuleResult]]) -> list[str]:
    bottom = _TOP + len(scenarios) * _ROW
    elements = [_text(x + _PANEL / 2, _TOP - 10, panel.title, anchor="middle")]
    elements += [
        f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}" stroke="#ccc"/>'
        for at in (x, x + _PANEL)
    ]
    elements += [
        _text(x, bottom + 18, f"{panel.low:g}"),
        _text(x + _PANEL, bottom + 18, f"{panel.high:g}", anchor="end"),
    ]
    for row, rules in enumerate(scenarios):
        y = _TOP + (row + 0.5) * _ROW
        elements.append(f'<line x1="{x}" x2="{x + _PANEL}" y1="{y}" y2="{y}" stroke="#eee"/>')
        # The first rule is ours; its dots cover the others.
        for result, colour in reversed([*zip(rules, _COLOURS, strict=True)]):
            elements.append(_dot(x + _PANEL * panel.share(result), y, colour))
    return elements


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_DOT}" fill="{colour}" fill-opacity="0.85"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
