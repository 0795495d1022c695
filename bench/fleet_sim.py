"""Where system prompts are found again: our `decide` beside other rules, on simulated fleets.

`python -m bench.fleet_sim` sends the same traffic through every rule, on the simulated clock. The
gateway's code is the real one; the Macs are not.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean, quantiles
from typing import Final

from rich.console import Console
from rich.progress import track

from bench.fleet_rules import BoundedHashing, CacheAware, LeastLoad, Oracle, Ours, RoundRobin, Rule
from bench.fleet_world import Ask, Kind, Mac, Row, Scenario, traffic
from bench.tables import Grid

RESULTS: Final = Path(__file__).parent / "results" / "fleet_sim.md"
_ABOUT: Final = """\
`python -m bench.fleet_sim --requests {}`: simulated Macs and clock, the gateway's real `decide` and
`Prefixes`. Every rule gets the same traffic. "over" is the longest time for which a Mac had more
than 1.25 times the mean share of its slots, and a request more. The oracle sees every cache, line
and speed, and takes the Mac with the first token first; it does not spare memory.

Two Macs hold nearly all of 40 system prompts between them, so even round robin finds nine in ten
again there, and nobody can be three times as fast in the middle: what is won is the slow tail.
"""
EVEN: Final = Kind()
FAST: Final = Kind(slots=16, read_per_s=2400.0, step_s=0.012, kept_tokens=120_000)
SLOW: Final = Kind(slots=4, read_per_s=600.0, step_s=0.03, kept_tokens=30_000)
SCENARIOS: Final = (
    Scenario("2 Macs", (EVEN,) * 2, prompts=40, busy=0.42),
    Scenario("8 Macs", (EVEN,) * 8, prompts=160, busy=0.42),
    Scenario("64 Macs", (EVEN,) * 64, prompts=1000, busy=0.42),
    Scenario("bursts", (EVEN,) * 8, prompts=160, busy=0.36, bursts=True),
    Scenario("unequal Macs", (*(FAST,) * 2, *(EVEN,) * 3, *(SLOW,) * 3), prompts=160, busy=0.42),
    Scenario("Macs that restart", (EVEN,) * 8, prompts=160, busy=0.42,
             restarts=((0.3, 0), (0.5, 3), (0.7, 0))),
    Scenario("small memories", (Kind(kept_tokens=20_000),) * 8, prompts=160, busy=0.38),
)  # fmt: skip
RULES: Final[tuple[Callable[[int], Rule], ...]] = (
    lambda _: Ours(Random(1)),
    lambda _: RoundRobin(),
    lambda _: LeastLoad(),
    lambda _: CacheAware(),
    BoundedHashing,
    lambda _: Oracle(),
)


@dataclass
class Found:
    """What one rule made of one traffic."""

    rule: str
    waits_s: list[float] = field(default_factory=list)
    """To the first token."""
    cached_tokens: int = 0
    shared_tokens: int = 0
    longest_over_s: float = 0.0
    """The longest time that a Mac was over 1.25 times the mean share of its slots, by a request."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.shared_tokens

    def wait_s(self, percent: int) -> float:
        return quantiles(self.waits_s, n=100)[percent - 1]


class Simulation:
    """One traffic through one rule."""

    def __init__(self, scenario: Scenario, rule: Rule, asks: Sequence[Ask]) -> None:
        self._macs = [Mac(str(n), kind) for n, kind in enumerate(scenario.kinds)]
        self._rule = rule
        self._asks = asks
        self._restarts = {int(share * len(asks)): mac for share, mac in scenario.restarts}
        self._line: deque[Ask] = deque()
        self._ends: list[tuple[float, int]] = []
        self._over_since_s: dict[int, float] = {}
        self.found = Found(rule.name)

    def run(self) -> Found:
        """Run to the end of the last answer."""
        for ask in self._asks:
            self._until(ask.at_s)
            if ask.number in self._restarts:
                self._restart(self._restarts[ask.number], ask.at_s)
            if self._line or not self._send(ask, ask.at_s):
                self._line.append(ask)
            self._watch(ask.at_s)
        self._until(float("inf"))
        assert len(self.found.waits_s) == len(self._asks), "each is answered once"
        return self.found

    def _until(self, to_s: float) -> None:
        """Let the Macs work, in the order in which something ends on them."""
        while self._ends and self._ends[0][0] <= to_s:
            now_s, at = heapq.heappop(self._ends)
            mac = self._macs[at]
            if mac.next_s() > now_s + 1e-9 and mac.now_s >= now_s:
                continue  # it has been looked at since
            ended = mac.advance(now_s)
            self._expect(at)
            for row in ended:
                self._close(row, mac)
            while ended and self._line and self._send(self._line[0], now_s):
                self._line.popleft()

    def _send(self, ask: Ask, now_s: float) -> bool:
        at = self._rule.choose(ask, self._macs, now_s)
        if at is None:
            return False
        mac = self._macs[at]
        for row in mac.advance(now_s):
            self._close(row, mac)
        mac.now_s = now_s
        mac.take(ask)
        self._rule.sent(ask, mac, now_s)
        self._expect(at)
        return True

    def _expect(self, at: int) -> None:
        next_s = self._macs[at].next_s()
        if next_s < float("inf"):
            heapq.heappush(self._ends, (next_s, at))

    def _close(self, row: Row, mac: Mac) -> None:
        assert row.first_s is not None, "what has ended has begun"
        self._rule.answered(row.ask, mac, row.cached_tokens)
        self.found.waits_s.append(row.first_s - row.ask.at_s)
        self.found.cached_tokens += row.cached_tokens
        self.found.shared_tokens += row.ask.prefix_tokens

    def _restart(self, at: int, now_s: float) -> None:
        """Lose a Mac's memory; what ran on it is asked again at once, as its clients would."""
        mac = self._macs[at]
        for row in mac.advance(now_s):
            self._close(row, mac)
        for row in mac.restart():
            self._rule.answered(row.ask, mac, None)
            if self._line or not self._send(row.ask, now_s):
                self._line.append(row.ask)

    def _watch(self, now_s: float) -> None:
        """Note how long a Mac has been busier than its share."""
        slots = sum(mac.kind.slots for mac in self._macs)
        busy = sum(mac.in_flight for mac in self._macs) / slots
        for at, mac in enumerate(self._macs):
            if mac.in_flight > 1.25 * busy * mac.kind.slots + 1:
                since_s = self._over_since_s.setdefault(at, now_s)
                self.found.longest_over_s = max(self.found.longest_over_s, now_s - since_s)
            else:
                self._over_since_s.pop(at, None)


def compare(scenario: Scenario, requests: int) -> list[Found]:
    """Send one traffic through every rule."""
    asks = tuple(traffic(scenario, requests, Random(7)))
    return [Simulation(scenario, make(len(scenario.kinds)), asks).run() for make in RULES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What was promised of one scenario, and what came of it."""

    scenario: str
    of_oracle: float
    """Found again, over what the oracle finds again; at least 0.95."""
    sooner: float
    """First token of round robin over ours, p50; at least 3."""
    late: float
    """First token, p99, over that of the least load; at most 1."""

    @classmethod
    def of(cls, scenario: str, found: Sequence[Found]) -> Judged:
        by = {one.rule: one for one in found}
        ours = by[Ours.name]
        return cls(
            scenario=scenario,
            of_oracle=ours.hit_rate / by[Oracle.name].hit_rate,
            sooner=by[RoundRobin.name].wait_s(50) / ours.wait_s(50),
            late=ours.wait_s(99) / by[LeastLoad.name].wait_s(99),
        )

    @property
    def met(self) -> bool:
        """Say whether all three were kept."""
        return self.of_oracle >= 0.95 and self.sooner >= 3 and self.late <= 1


def _verdicts(judged: Sequence[Judged]) -> Grid:
    return Grid(
        title="Promised",
        columns=(
            "scenario",
            "found again, of the oracle's (0.95)",
            "p50 sooner than round robin (3)",
            "p99 over least load's (1)",
            "met",
        ),
        rows=tuple(
            (
                one.scenario,
                f"{one.of_oracle:.2f}",
                f"{one.sooner:.1f}",
                f"{one.late:.2f}",
                "yes" if one.met else "NO",
            )
            for one in judged
        ),
    )


def _grid(scenario: Scenario, found: Sequence[Found]) -> Grid:
    return Grid(
        title=f"{scenario.name}: {len(scenario.kinds)} workers, {scenario.prompts} system prompts",
        columns=("rule", "found again", "first token p50, s", "p99, s", "mean, s", "over, s"),
        rows=tuple(
            (
                one.rule,
                f"{one.hit_rate:.0%}",
                f"{one.wait_s(50):.2f}",
                f"{one.wait_s(99):.1f}",
                f"{mean(one.waits_s):.2f}",
                f"{one.longest_over_s:.0f}",
            )
            for one in found
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet_sim", description=__doc__)
    parser.add_argument("--requests", type=int, default=6000, help="of each scenario")
    options = parser.parse_args()
    console = Console(highlight=False, width=110)
    grids, judged = [], []
    for scenario in track(SCENARIOS, console=console, transient=True):
        found = compare(scenario, options.requests)
        grids.append(_grid(scenario, found))
        judged.append(Judged.of(scenario.name, found))
        console.print(grids[-1].drawn())
    grids.insert(0, _verdicts(judged))
    console.print(grids[0].drawn())
    page = ["# Where system prompts are found again\n", _ABOUT.format(options.requests)]
    page += [grid.markdown() for grid in grids]
    RESULTS.write_text("\n".join(page).rstrip() + "\n")


if __name__ == "__main__":
    main()
