"""Results of the rules on the simulated traffic, and their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, quantiles

from bench.fleet.rules import LeastLoad, Oracle, Ours, RoundRobin
from bench.fleet.world import Scenario
from bench.harness.tables import Grid


@dataclass
class RuleResult:
    """The result of one rule with one traffic."""

    rule: str
    waits_s: list[float] = field(default_factory=list)
    """Times to the first token."""
    cached_tokens: int = 0
    shared_tokens: int = 0
    longest_over_s: float = 0.0
    """The longest time of a Mac above 1.25 times the mean share of its slots, by a request."""
    over_bound: float = 0.0
    """That time over the duration of the longest answer on that Mac."""

    def add(self, other: RuleResult) -> None:
        """Add the result of another traffic."""
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
class ScenarioResult:
    """The targets of one scenario, and the results."""

    scenario: str
    sessions: bool
    """Whether sessions stay where they are: then the bound of the load is no target."""
    hit_ratio: float
    """The cached share over that of the oracle; at least 0.95."""
    ttft_ratio: float
    """Time to first token of round robin over ours, p50; at least 3."""
    oracle_ttft_ratio: float
    """The same ratio for the oracle."""
    tail_ratio: float
    """Time to first token over that of least load, p99; at most 1."""
    over_bound: float
    """The longest time of a Mac above its share, over its bound; at most 1."""

    @classmethod
    def of(cls, scenario: Scenario, results: Sequence[RuleResult]) -> ScenarioResult:
        by_rule = {result.rule: result for result in results}
        ours, oracle = by_rule[Ours.name], by_rule[Oracle.name]
        round_robin_s = by_rule[RoundRobin.name].wait_s(50)
        return cls(
            scenario=scenario.name,
            sessions=scenario.sessions,
            hit_ratio=ours.hit_rate / oracle.hit_rate,
            ttft_ratio=round_robin_s / ours.wait_s(50),
            oracle_ttft_ratio=round_robin_s / oracle.wait_s(50),
            tail_ratio=ours.wait_s(99) / by_rule[LeastLoad.name].wait_s(99),
            over_bound=ours.over_bound,
        )

    @property
    def met(self) -> str:
        """Return whether all four targets were met."""
        over = self.over_bound > 1 and not self.sessions
        other_targets = self.hit_ratio >= 0.95 and self.tail_ratio <= 1 and not over
        if not other_targets:
            return "NO"
        if self.ttft_ratio >= 3:
            return "yes"
        return "impossible" if self.oracle_ttft_ratio < 3 else "NO"


def target_table(scenario_results: Sequence[ScenarioResult]) -> Grid:
    """Return the targets of each scenario with the results."""
    return Grid(
        title="Targets",
        columns=(
            "scenario",
            "cached over the oracle's (0.95)",
            "p50 of round robin over ours (3)",
            "... over the oracle's",
            "p99 over that of least load (1)",
            "over its share, of the bound (1)",
            "met",
        ),
        rows=tuple(
            (
                result.scenario,
                f"{result.hit_ratio:.3f}",
                f"{result.ttft_ratio:.1f}",
                f"{result.oracle_ttft_ratio:.1f}",
                f"{result.tail_ratio:.2f}",
                f"{result.over_bound:.2f}",
                result.met,
            )
            for result in scenario_results
        ),
    )


def rule_table(scenario: Scenario, results: Sequence[RuleResult]) -> Grid:
    """Return the results of every rule in one scenario."""
    return Grid(
        title=f"{scenario.name}: {len(scenario.kinds)} workers, {scenario.prompts} system prompts",
        columns=("rule", "cached", "first token p50, s", "p99, s", "mean, s", "over, s"),
        rows=tuple(
            (
                result.rule,
                f"{result.hit_rate:.1%}",
                f"{result.wait_s(50):.2f}",
                f"{result.wait_s(99):.1f}",
                f"{mean(result.waits_s):.2f}",
                f"{result.longest_over_s:.0f}",
            )
            for result in results
        ),
    )
