"""Counts of a lane since its start, and its recent speed; pure: no clock is read."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.protocol import LaneReport, PrefixCounts, SpecPrefillCounts, Speculation, TimeSaved
from paceline.request.profile import Bypass
from workers.engine.decode.row import Row
from workers.engine.types import LaneName

_DECAY = 0.8
"""Weight of the past against one more measurement."""


class Throughput:
    """Tokens a second, over the last few measurements."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: float, duration_s: float) -> None:
        """Record the duration of `tokens` tokens."""
        self._tokens = _DECAY * self._tokens + tokens
        self._seconds = _DECAY * self._seconds + duration_s

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput; 0 while nothing is measured."""
        return self._tokens / self._seconds if self._seconds else 0.0


class LaneCounters:
    """Sums of one lane, which only grow; written by the engine thread, read by any."""

    def __init__(self, name: LaneName, *, slots: int, draft_tokens: int) -> None:
        self.slots = slots
        self.head_healthy = True
        """False after a failed self-test or too many consecutive errors."""
        self._lock = threading.Lock()
        self._name = name
        self._requested_draft_tokens = draft_tokens
        self._draft_tokens_by_rows = (draft_tokens,) * slots
        self._draft_speedup_by_rows = [0.0] * slots
        self._prefill_speed, self._decode_speed = Throughput(), Throughput()
        self._decode_saved_s = self._prefill_saved_s = 0.0
        self._running = self._waiting = self._pending_prefill_tokens = 0
        self._sums: dict[str, Any] = {
            "bypass_counts": Counter[str](),
            "speculation": Speculation(),
            "spec_prefill": SpecPrefillCounts(),
            "prefix": PrefixCounts(),
            "requests": 0,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "steps": 0,
            "steps_ahead": 0,
        }
        """By their names in a report."""

    def add(self, **counts: Any) -> None:
        """Add counts to the sums of these names in a report, all at once."""
        with self._lock:
            for name, count in counts.items():
                self._sums[name] += count

    def record_bypass(self, row: Row, *reasons: Bypass) -> None:
        """Count the reasons why a request does not speculate, or stopped to speculate."""
        if not row.generation.further_choice:
            self.add(bypass_counts=Counter(reason.value for reason in reasons))

    def record_prefix_lookup(self, row: Row, saved_s: float) -> None:
        """Count a hit or miss of the prefix cache, and the prefill time that it saved."""
        hit = row.cached_tokens > 0
        kinds = {kind: tokens for kind, tokens in row.cached_kinds.items() if tokens}
        self.add(
            prefix=PrefixCounts(
                hits=hit, misses=not hit, cached_tokens=row.cached_tokens, tokens_by_kind=kinds
            )
        )
        with self._lock:
            self._prefill_saved_s += saved_s

    def record_finish(self, row: Row) -> None:
        """Count an answer that ended or failed; its prompt once for all choices.

        What another worker has generated of it counts there.
        """
        usage = row.usage()
        speculation = row.speculation.total(own=True)
        if row.drafting_skipped and not speculation.drafted:
            self.record_bypass(row, Bypass.MTP_NOT_PAYING)
        first = not row.generation.further_choice
        self.add(
            completion_tokens=usage.completion_tokens - row.given_tokens,
            speculation=speculation,
            requests=int(first),
            prompt_tokens=usage.prompt_tokens * first,
        )

    def set_occupancy(self, *, running: int, waiting: int, pending_prefill_tokens: int) -> None:
        """Set the numbers of running and queued requests, and the prompt tokens still to read."""
        with self._lock:
            self._running = running
            self._waiting = waiting
            self._pending_prefill_tokens = pending_prefill_tokens

    @property
    def prefill_tokens_per_s(self) -> float:
        """Return the recent speed of reading prompts; 0 while nothing is measured."""
        with self._lock:
            return self._prefill_speed.tokens_per_s

    def record_prefill(self, tokens: int, duration_s: float) -> None:
        """Record the duration of one chunk of a prompt."""
        with self._lock:
            self._prefill_speed.observe(tokens, duration_s)

    def record_decode(
        self, tokens_per_row: float, duration_s: float, *, ahead: bool = False
    ) -> None:
        """Record the duration of a step, and the mean number of tokens that each row got.

        `ahead` says whether the device computed another step while the host read this one.
        """
        with self._lock:
            self._sums["steps"] += 1
            self._sums["steps_ahead"] += ahead
            self._decode_speed.observe(tokens_per_row, duration_s)

    def record_decode_saving(self, seconds: float) -> None:
        """Add the time that a drafted step saved; negative if it cost more than plain steps."""
        with self._lock:
            self._decode_saved_s += seconds

    def set_drafts(self, tokens_by_rows: Sequence[int], rows: int, speedup: float) -> None:
        """Set the best draft length for 1, 2, 3 ... rows, and how much faster a batch of `rows` is.

        A speedup of 0 is not measured.
        """
        with self._lock:
            self._draft_tokens_by_rows = tuple(tokens_by_rows)
            if rows <= self.slots:  # a batch may also have rows of other lanes
                self._draft_speedup_by_rows[rows - 1] = speedup

    def report(self) -> LaneReport:
        """Return a consistent copy of all counts."""
        with self._lock:
            by_rows, speedup = self._draft_tokens_by_rows, tuple(self._draft_speedup_by_rows)
            if not self.head_healthy:
                by_rows, speedup = (0,) * self.slots, ()
            return LaneReport(
                name=self._name,
                running=self._running,
                waiting=self._waiting,
                slots=self.slots,
                pending_prefill_tokens=self._pending_prefill_tokens,
                prefill_tokens_per_s=self._prefill_speed.tokens_per_s,
                decode_tokens_per_s=self._decode_speed.tokens_per_s,
                mtp_enabled=self._requested_draft_tokens > 0,
                head_healthy=self.head_healthy,
                requested_draft_tokens=self._requested_draft_tokens,
                effective_draft_tokens=by_rows[min(max(self._running, 1), self.slots) - 1],
                draft_tokens_by_rows=by_rows,
                draft_speedup_by_rows=speedup,
                time_saved=TimeSaved(
                    decode_ms=round(self._decode_saved_s * 1000),
                    prefill_ms=round(self._prefill_saved_s * 1000),
                ),
                **self._sums | {"bypass_counts": dict(self._sums["bypass_counts"])},
            )
