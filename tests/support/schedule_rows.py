"""Rows of a random schedule, checked after every step, and statistics of schedules."""

from dataclasses import dataclass, field

from paceline.protocol import Speculation
from tests.support.engine_lane import RowEvents


@dataclass(slots=True)
class ScheduleStats:
    """Statistics that show what the schedules covered."""

    schedules: int = 0
    rows: int = 0
    with_rules: int = 0
    """Sampled, or greedy with penalties."""
    cancelled: int = 0
    ended_by_string: int = 0
    ended_by_token: int = 0
    ended_by_limit: int = 0
    ended_in_draft: int = 0
    from_prefix_cache: int = 0
    without_head: int = 0
    """Rows that stopped drafting after an error of the head."""
    near_ties: int = 0
    """Answers that differ from the replay where two scores differ by float noise."""
    tokens: int = 0
    speculation: Speculation = field(default_factory=Speculation)


@dataclass(eq=False, kw_only=True)
class ScheduledRow(RowEvents):
    """A row of a schedule, with its counts after the last step."""

    stop: tuple[str, ...]
    k: int
    """Tokens that the head drafts."""
    longest: int
    """The longest draft."""
    last_tokens: int = 0
    last_total: Speculation = field(default_factory=Speculation)
    ended_in_draft: bool = False

    def check_step(self) -> None:
        """Check that the counts of the last step add up."""
        total = self.row.speculation.total()
        new = len(self.row.answer) - self.last_tokens
        if self.last_tokens == 0 and new:
            new -= 1  # the prefill chose it, and no step
        steps, drafted = (
            total.steps - self.last_total.steps,
            total.drafted - self.last_total.drafted,
        )
        accepted, errors = (
            total.accepted - self.last_total.accepted,
            total.errors - self.last_total.errors,
        )
        new_steps = self.row.speculation.steps[self.last_total.steps :]
        self.last_tokens, self.last_total = len(self.row.answer), total
        assert total.drafted == total.accepted + total.rejected + total.errors
        assert sum(total.histogram) == total.steps
        assert sum(count * n for count, n in enumerate(total.histogram)) == total.accepted
        assert errors <= self.longest
        assert new or not errors or not steps, "a step that failed alone has added nothing"
        drafted -= errors  # the next step may fail before the host reads the one that succeeded
        if steps:
            assert new_steps == [(drafted, accepted)]
            assert 1 <= drafted <= self.longest
            assert sum(total.drafted_by_source.values()) == total.drafted
            assert sum(total.accepted_by_source.values()) == total.accepted
            assert accepted <= drafted
            self.ended_in_draft = bool(self.row.finish_reason) and new == accepted
            assert new == accepted + 1 or self.ended_in_draft
        else:
            assert (new_steps, accepted, drafted) == ([], 0, 0)
            assert new in (0, 1)
