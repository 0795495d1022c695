"""Counts of a lane since its start, and its recent speed; pure: no clock is read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

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
        self._lock = threading.Lock()
        self._name = name
        self.slots = slots
        self._requested_draft_tokens = draft_tokens
        self._draft_tokens_by_rows = (draft_tokens,) * slots
        self._draft_speedup_by_rows = [0.0] * slots
        self.head_healthy = True
        """False after a failed self-test or too many consecutive errors."""
        self._bypass: Counter[str] = Counter()
        self._speculation = Speculation()
        self._spec_prefill = SpecPrefillCounts()
        self._prefix = PrefixCounts()
        self._decode_saved_s = 0.0
        self._prefill_saved_s = 0.0
        self._requests = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._running = 0
        self._waiting = 0
        self._pending_prefill_tokens = 0
        self._prefill_speed, self._decode_speed = Throughput(), Throughput()

    def record_bypass(self, row: Row, *reasons: Bypass) -> None:
        """Count the reasons why a request does not speculate, or stopped to speculate."""
        if not row.generation.further_choice:
            with self._lock:
                self._bypass.update(reason.value for reason in reasons)

    def record_sparse_prefill(self, *, scored: int, selected: int) -> None:
        """Count a prompt of which a draft model selected the tokens to read."""
        with self._lock:
            self._spec_prefill += SpecPrefillCounts(
                prompts=1, scored_tokens=scored, selected_tokens=selected
            )

    def record_full_prefill(self, reason: str) -> None:
        """Count a prompt that was read in full although the worker has a draft model."""
        with self._lock:
            self._spec_prefill += SpecPrefillCounts(full_prefills={reason: 1})

    def record_decode_saving(self, seconds: float) -> None:
        """Add the time that a drafted step saved; negative if it cost more than plain steps."""
        with self._lock:
            self._decode_saved_s += seconds

    def record_prefix_lookup(self, row: Row, saved_s: float) -> None:
        """Count a hit or miss of the prefix cache, and the prefill time that it saved."""
        hit = row.cached_tokens > 0
        with self._lock:
            self._prefill_saved_s += saved_s
            self._prefix += PrefixCounts(
                hits=hit,
                misses=not hit,
                cached_tokens=row.cached_tokens,
                tokens_by_kind={
                    kind: tokens for kind, tokens in row.cached_kinds.items() if tokens
                },
            )

    @property
    def prefill_tokens_per_s(self) -> float:
        """Return the recent speed of reading prompts; 0 while nothing is measured."""
        with self._lock:
            return self._prefill_speed.tokens_per_s

    def record_move(self, result: str) -> None:
        """Count a transfer from another worker by its result."""
        with self._lock:
            self._prefix += PrefixCounts(moves={result: 1})

    def record_too_large(self) -> None:
        """Count what the prefix cache cannot hold."""
        with self._lock:
            self._prefix += PrefixCounts(too_large=1)

    def record_finish(self, row: Row) -> None:
        """Count an answer that ended or failed; its prompt once for all choices.

        What another worker has generated of it counts there.
        """
        usage = row.usage()
        speculation = row.speculation.total(own=True)
        if row.drafting_skipped and not speculation.drafted:
            self.record_bypass(row, Bypass.MTP_NOT_PAYING)
        with self._lock:
            self._completion_tokens += usage.completion_tokens - row.given_tokens
            self._speculation += speculation
            if not row.generation.further_choice:
                self._requests += 1
                self._prompt_tokens += usage.prompt_tokens

    def set_occupancy(self, *, running: int, waiting: int, pending_prefill_tokens: int) -> None:
        """Set the numbers of running and queued requests, and the prompt tokens still to read."""
        with self._lock:
            self._running = running
            self._waiting = waiting
            self._pending_prefill_tokens = pending_prefill_tokens

    def record_prefill(self, tokens: int, duration_s: float) -> None:
        """Record the duration of one chunk of a prompt."""
        with self._lock:
            self._prefill_speed.observe(tokens, duration_s)

    def record_decode(self, tokens_per_row: float, duration_s: float) -> None:
        """Record the duration of a step, and the mean number of tokens that each row got."""
        with self._lock:
            self._decode_speed.observe(tokens_per_row, duration_s)

    def set_draft_tokens(self, by_rows: Sequence[int]) -> None:
        """Set the best draft length for 1, 2, 3 ... rows."""
        with self._lock:
            self._draft_tokens_by_rows = tuple(by_rows)

    def set_draft_speedup(self, rows: int, speedup: float) -> None:
        """Set how much faster the best drafts make a batch of so many rows; 0: not measured."""
        with self._lock:
            self._draft_speedup_by_rows[rows - 1] = speedup

    def report(self) -> LaneReport:
        """Return a consistent copy of all counts."""
        with self._lock:
            by_rows = self._draft_tokens_by_rows if self.head_healthy else (0,) * self.slots
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
                draft_speedup_by_rows=tuple(self._draft_speedup_by_rows)
                if self.head_healthy
                else (),
                speculation=self._speculation,
                bypass_counts=dict(self._bypass),
                spec_prefill=self._spec_prefill,
                prefix=self._prefix,
                time_saved=TimeSaved(
                    decode_ms=round(self._decode_saved_s * 1000),
                    prefill_ms=round(self._prefill_saved_s * 1000),
                ),
                requests=self._requests,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._completion_tokens,
            )
