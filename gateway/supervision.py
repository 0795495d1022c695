"""When a dead worker is started again, and when it is not worth it.

Pure: the clock comes in with every death, nothing here sleeps or starts a process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.adapters.process import ExitCode

REFUSALS = frozenset((ExitCode.SETTINGS, ExitCode.MODEL))
"""Exit codes of a worker that would refuse again: settings that cannot work, an unusable model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How patient the supervisor is."""

    first_wait_s: float = 0.5
    growth: float = 2.0
    longest_wait_s: float = 30.0
    settled_after_s: float = 60.0
    """A life this long shows that the worker can run: the waits begin anew."""
    hopeless_after: int = 5
    """This many deaths in a row without having been ready once are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How one life of the worker ended."""

    started_mono_s: float
    died_mono_s: float
    exit_code: int
    """Negative: the number of the signal that killed it, as `subprocess` says."""
    was_ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start it again after this wait."""

    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Do not start it again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What is remembered of the lives so far; each death makes a new value."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    deaths_in_a_row: int = 0
    ever_ready: bool = False

    def after(self, death: Death) -> tuple[Supervision, Restart | GiveUp]:
        """Decide what follows a death: a wait that doubles up to a bound, or the end."""
        ever_ready = self.ever_ready or death.was_ready
        settled = death.died_mono_s - death.started_mono_s >= self.policy.settled_after_s
        deaths = 1 if settled and death.was_ready else self.deaths_in_a_row + 1
        known = Supervision(policy=self.policy, deaths_in_a_row=deaths, ever_ready=ever_ready)
        if not ever_ready and death.exit_code in REFUSALS:
            return known, GiveUp(reason="the worker refuses to start; its own words are above")
        if not ever_ready and deaths >= self.policy.hopeless_after:
            return known, GiveUp(reason=f"the worker died {deaths} times before it was ready")
        wait_s = self.policy.first_wait_s * self.policy.growth ** (deaths - 1)
        return known, Restart(wait_s=min(wait_s, self.policy.longest_wait_s))
