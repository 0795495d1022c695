"""What the rules made of the simulated traffic, against what was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, quantiles

from bench.fleet.rules import LeastLoad, Oracle, Ours, RoundRobin
from bench.fleet.world import Scenario
from bench.harness.tables import Grid


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
    over_bound: float = 0.0
    """The same, over what the longest answer takes on that Mac."""

    def add(self, other: Found) -> None:
        """Add what came of another traffic."""
        self.waits_s += other.waits_s
        self.cached_tokens += other.cached_tokens
        self.shared_tokens += other.shared_tokens
        self.longest_over_s = max(self.longest_over_s, other.longest_over_s)
        self.over_bound = max(self.over_bound, other.over_bound)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.shared_tokens

    def wait_s(self, percent: int) -> float:
        return quantiles(self.waits_s, n=100)[percent - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What was promised of one scenario, and what came of it."""

    scenario: str
    of_oracle: float
    """Found again, over what the oracle finds again; at least 0.95."""
    sooner: float
    """First token of round robin over ours, p50; at least 3."""
    oracle_sooner: float
    """The same of the oracle."""
    late: float
    """First token, p99, over that of the least load; at most 1."""
    over_bound: float
    """The longest time that a Mac had too much, over its bound; at most 1."""

    @classmethod
    def of(cls, scenario: str, found: Sequence[Found]) -> Judged:
        by = {one.rule: one for one in found}
        ours, oracle = by[Ours.name], by[Oracle.name]
        in_turn_s = by[RoundRobin.name].wait_s(50)
        return cls(
            scenario=scenario,
            of_oracle=ours.hit_rate / oracle.hit_rate,
            sooner=in_turn_s / ours.wait_s(50),
            oracle_sooner=in_turn_s / oracle.wait_s(50),
            late=ours.wait_s(99) / by[LeastLoad.name].wait_s(99),
            over_bound=ours.over_bound,
        )

    @property
    def met(self) -> str:
        """Say whether all four were kept."""
        others = self.of_oracle >= 0.95 and self.late <= 1 and self.over_bound <= 1
        if not others:
            return "NO"
        if self.sooner >= 3:
            return "yes"
        return "nobody can" if self.oracle_sooner < 3 else "NO"


def verdicts(judged: Sequence[Judged]) -> Grid:
    """Show what was promised of each scenario beside what came of it."""
    return Grid(
        title="Promised",
        columns=(
            "scenario",
            "found again, of the oracle's (0.95)",
            "p50 sooner than round robin (3)",
            "... the oracle's",
            "p99 over least load's (1)",
            "over, of its bound (1)",
            "met",
        ),
        rows=tuple(
            (
                one.scenario,
                f"{one.of_oracle:.2f}",
                f"{one.sooner:.1f}",
                f"{one.oracle_sooner:.1f}",
                f"{one.late:.2f}",
                f"{one.over_bound:.2f}",
                one.met,
            )
            for one in judged
        ),
    )


def drawn(scenario: Scenario, found: Sequence[Found]) -> Grid:
    """Show what every rule made of one scenario."""
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
