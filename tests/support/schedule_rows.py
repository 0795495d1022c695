"""What a schedule is made of: rows that are watched step by step, a head that raises, counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workers.engine.row import Row
from workers.engine.types import Delta, EngineError, Event, Finished
from workers.protocol import Speculation


@dataclass(slots=True)
class ScheduleStats:
    """What the schedules were made of, so that it can be seen what they covered."""

    schedules: int = 0
    rows: int = 0
    with_rules: int = 0
    """Sampled, or greedy with penalties."""
    cancelled: int = 0
    ended_by_string: int = 0
    ended_by_token: int = 0
    ended_by_limit: int = 0
    ended_inside_a_draft: int = 0
    from_prefix_cache: int = 0
    without_head: int = 0
    """Rows that lost their drafts, since the head had raised."""
    near_ties: int = 0
    """Answers that part from the replay where two scores differ by float noise."""
    tokens: int = 0
    speculation: Speculation = field(default_factory=Speculation)


class FailingHead:
    """An MTP head that raises in the call that somebody announced."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self.calls_left: int | None = None

    def __getattr__(self, name: str) -> Any:
        got = getattr(self._head, name)
        if name not in ("forward", "draft"):
            return got

        def call(*arguments: Any) -> Any:
            if self.calls_left is not None:
                self.calls_left -= 1
                if self.calls_left < 0:
                    self.calls_left = None
                    raise RuntimeError("the head has a bad moment")
            return got(*arguments)

        return call


@dataclass(slots=True, eq=False)
class ScheduledRow:
    """One row of a schedule, and what was seen of it so far."""

    row: Row
    stop: tuple[str, ...]
    k: int
    text: str = ""
    end: Finished | EngineError | None = None
    seen_tokens: int = 0
    seen: Speculation = field(default_factory=Speculation)
    inside: bool = False

    def on_event(self, event: Event | EngineError) -> None:
        """Take what the row's sink is told."""
        assert self.end is None, "nothing may follow the end"
        if isinstance(event, Delta):
            self.text += event.text
        else:
            self.end = event

    def check_step(self) -> None:
        """Account for what the last step did to this row."""
        total = self.row.speculation.total()
        new = len(self.row.answer) - self.seen_tokens
        if self.seen_tokens == 0 and new:
            new -= 1  # chosen behind the prompt, by no round
        steps, drafted = total.steps - self.seen.steps, total.drafted - self.seen.drafted
        accepted, errors = total.accepted - self.seen.accepted, total.errors - self.seen.errors
        told = self.row.speculation.steps[self.seen.steps :]
        self.seen_tokens, self.seen = len(self.row.answer), total
        assert total.drafted == total.accepted + total.rejected + total.errors
        assert sum(total.histogram) == total.steps
        assert sum(count * n for count, n in enumerate(total.histogram)) == total.accepted
        if errors:
            assert (steps, accepted, new, drafted) == (0, 0, 0, errors)
            assert told == ()
        elif steps:
            assert told == ((drafted, accepted),)
            assert 1 <= drafted <= self.k
            assert accepted <= drafted
            self.inside = bool(self.row.finish_reason) and new == accepted
            assert new == accepted + 1 or self.inside
        else:
            assert (told, accepted, drafted) == ((), 0, 0)
            assert new in (0, 1)
