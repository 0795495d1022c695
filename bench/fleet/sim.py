"""Where system prompts are found again: our `decide` beside other rules, on simulated fleets.

`python -m bench.fleet.sim` sends the same traffic through every rule, on the simulated clock. The
gateway's code is the real one; the Macs are not.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

from rich.console import Console
from rich.progress import track

from bench.fleet.plot import plotted
from bench.fleet.rules import BoundedHashing, CacheAware, LeastLoad, Oracle, Ours, RoundRobin, Rule
from bench.fleet.verdicts import Found, Judged, drawn, verdicts
from bench.fleet.world import Ask, Kind, Mac, Row, Scenario, traffic

RESULTS: Final = Path(__file__).parents[1] / "results" / "fleet_sim.md"
PLOT: Final = RESULTS.with_suffix(".svg")
TUNED_ON: Final = (101, 102)
REPORTED_ON: Final = (7, 8)
_ABOUT: Final = """\
`python -m bench.fleet.sim --requests {}`: simulated Macs and clock, the gateway's real `decide`,
`Fleet` and `Prefixes`, which know of the Macs what a gateway knows: what it has sent, and a
heartbeat every two seconds, in which a Mac tells what it keeps (64 system prompts at most). Every
rule gets the same traffic. The constants of `decide` were chosen on the seeds {}; this is on {}.
The oracle sees every cache, line and speed, and takes the Mac with the first token first; it does
not spare memory.

"over" is the longest time for which a Mac had more than 1.25 times the mean share of its slots, and
a request more. The bound is what the longest answer takes there in a full batch: until some of its
requests have ended a Mac cannot have fewer, whatever it is sent.

Where two Macs hold nearly all of 40 system prompts between them, even round robin finds nine in ten
again. The first token in the middle is then one of a prompt that is held, whoever chose: the oracle
itself is no sooner, so three times is beyond everybody's reach ("nobody can"). What is won is the
slow tail.
"""
EVEN: Final = Kind()
FAST: Final = Kind(slots=16, read_per_s=2400.0, step_s=0.012, kept_tokens=120_000)
SLOW: Final = Kind(slots=4, read_per_s=600.0, step_s=0.03, kept_tokens=30_000)
SCENARIOS: Final = (
    Scenario("2 Macs", (EVEN,) * 2, prompts=40, busy=0.42),
    Scenario("2 Macs, many prompts", (EVEN,) * 2, prompts=160, busy=0.36),
    Scenario("8 Macs", (EVEN,) * 8, prompts=160, busy=0.42),
    Scenario("64 Macs", (EVEN,) * 64, prompts=1000, busy=0.42),
    Scenario("bursts", (EVEN,) * 8, prompts=160, busy=0.36, bursts=True),
    Scenario("unequal Macs", (*(FAST,) * 2, *(EVEN,) * 3, *(SLOW,) * 3), prompts=160, busy=0.42),
    Scenario("Macs that restart", (EVEN,) * 8, prompts=160, busy=0.42,
             restarts=((0.3, 0), (0.5, 3), (0.7, 0))),
    Scenario("small memories", (Kind(kept_tokens=20_000),) * 8, prompts=160, busy=0.38),
    Scenario("two gateways", (EVEN,) * 8, prompts=160, busy=0.42, sights=2),
    Scenario("two gateways, bursts", (*(FAST,) * 2, *(EVEN,) * 3, *(SLOW,) * 3), prompts=160,
             busy=0.36, bursts=True, sights=2),
)  # fmt: skip
RULES: Final[tuple[Callable[[Scenario], Rule], ...]] = (
    lambda scenario: Ours(scenario.sights, Random(1)),
    lambda _: RoundRobin(),
    lambda _: LeastLoad(),
    lambda _: CacheAware(),
    lambda scenario: BoundedHashing(len(scenario.kinds)),
    lambda _: Oracle(),
)


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
                over_s = now_s - self._over_since_s.setdefault(at, now_s)
                found, bound_s = self.found, mac.kind.longest_answer_s
                found.longest_over_s = max(found.longest_over_s, over_s)
                found.over_bound = max(found.over_bound, over_s / bound_s)
            else:
                self._over_since_s.pop(at, None)


def compare(scenario: Scenario, requests: int, seeds: Sequence[int]) -> list[Found]:
    """Send one traffic for each seed through every rule."""
    found = [Found(make(scenario).name) for make in RULES]
    for seed in seeds:
        asks = tuple(traffic(scenario, requests, Random(seed)))
        for sums, make in zip(found, RULES, strict=True):
            sums.add(Simulation(scenario, make(scenario), asks).run())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.sim", description=__doc__)
    parser.add_argument("--requests", type=int, default=4000, help="of each scenario and seed")
    parser.add_argument("--tune", action="store_true", help="on the seeds for that; no page")
    parser.add_argument("--only", help="scenarios whose name holds this")
    options = parser.parse_args()
    console = Console(highlight=False, width=110)
    grids, judged = [], []
    by_scenario: dict[str, list[Found]] = {}
    seeds = TUNED_ON if options.tune else REPORTED_ON
    scenarios = [one for one in SCENARIOS if not options.only or options.only in one.name]
    for scenario in track(scenarios, console=console, transient=True):
        found = compare(scenario, options.requests, seeds)
        grids.append(drawn(scenario, found))
        judged.append(Judged.of(scenario.name, found))
        by_scenario[scenario.name] = found
        console.print(grids[-1].drawn())
    grids.insert(0, verdicts(judged))
    console.print(grids[0].drawn())
    if options.tune or options.only:
        return
    told = [", ".join(map(str, seeds)) for seeds in (TUNED_ON, REPORTED_ON)]
    page = ["# Where system prompts are found again\n", _ABOUT.format(options.requests, *told)]
    page += [grids[0].markdown(), f"![Each rule in each scenario]({PLOT.name})\n"]
    page += [grid.markdown() for grid in grids[1:]]
    RESULTS.write_text("\n".join(page).rstrip() + "\n")
    PLOT.write_text(plotted(by_scenario))


if __name__ == "__main__":
    main()
