"""What a lane has done since it started: counts that only grow, read as one snapshot.

How fast a lane reads and writes, as it was lately: for gateways, to guess what a request waits.

Pure: durations come in, no clock is read.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from policies.request.profile import Bypass
from workers.engine.row import Row
from workers.engine.types import LaneName
from workers.protocol import LaneReport, PrefixCounts, SpecPrefillCounts, Speculation, TimeSaved

_FADE = 0.8
"""Weight of what was before against one more measurement."""


class Throughput:
    """Tokens in a second, over the last few measurements."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: float, duration_s: float) -> None:
        """Learn how long so many tokens took."""
        self._tokens = _FADE * self._tokens + tokens
        self._seconds = _FADE * self._seconds + duration_s

    @property
    def tokens_s(self) -> float:
        """Tell how many a second it were; 0 while nothing was measured."""
        return self._tokens / self._seconds if self._seconds else 0.0


class LaneCounters:
    """The sums of one lane; written by the engine thread, read by any."""

    def __init__(self, name: LaneName, *, slots: int, draft_tokens: int) -> None:
        self._lock = threading.Lock()
        self._name = name
        self._slots = slots
        self._requested_draft_tokens = draft_tokens
        self._settled = (draft_tokens,) * slots
        self.head_healthy = True
        """False once the self-test or too many errors have found it unhealthy."""
        self._bypass: Counter[str] = Counter()
        self._speculation = Speculation()
        self._spec_prefill = SpecPrefillCounts()
        self._prefix = PrefixCounts()
        self._decode_saved_s = 0.0
        self._prompt_saved_s = 0.0
        self._requests = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._running = 0
        self._waiting = 0
        self._unread_tokens = 0
        self._reading, self._writing = Throughput(), Throughput()

    def record_admission(self, row: Row) -> None:
        """Count why a newly admitted request will not speculate; reasons may overlap."""
        if not row.generation.further_choice:
            with self._lock:
                self._bypass.update(str(reason) for reason in row.bypass)

    def record_bypass(self, row: Row, reason: Bypass) -> None:
        """Count why a request that could speculate when it came goes on without."""
        if not row.generation.further_choice:
            with self._lock:
                self._bypass[reason.value] += 1

    def record_sparse_prefill(self, *, scored: int, kept: int) -> None:
        """Count a prompt of which a draft model chose what to read."""
        with self._lock:
            self._spec_prefill += SpecPrefillCounts(
                prompts=1, scored_tokens=scored, selected_tokens=kept
            )

    def record_full_prefill(self, reason: str) -> None:
        """Count a prompt that could have been read sparsely and is read in full."""
        with self._lock:
            self._spec_prefill += SpecPrefillCounts(full_prefills={reason: 1})

    def record_decode_saving(self, seconds: float) -> None:
        """Count the time that a drafted round has saved; below zero where it has cost some."""
        with self._lock:
            self._decode_saved_s += seconds

    def record_prefix_lookup(self, row: Row, saved_s: float) -> None:
        """Count whether the shared beginning of a prompt was found, and the time that it saved."""
        hit = row.cached_tokens > 0
        with self._lock:
            self._prompt_saved_s += saved_s
            self._prefix += PrefixCounts(hits=hit, misses=not hit, cached_tokens=row.cached_tokens)

    def record_finish(self, row: Row) -> None:
        """Count an answer that has ended, for whatever reason; its prompt once for all choices."""
        usage = row.usage()
        speculation = row.speculation.total()
        if row.drafting_skipped and not speculation.drafted:
            self.record_bypass(row, Bypass.MTP_NOT_PAYING)
        with self._lock:
            self._completion_tokens += usage.completion_tokens
            self._speculation += speculation
            if not row.generation.further_choice:
                self._requests += 1
                self._prompt_tokens += usage.prompt_tokens

    def set_occupancy(self, *, running: int, waiting: int, pending_prefill_tokens: int) -> None:
        """Note how many requests hold a row, how many wait for one, and what is to be read."""
        with self._lock:
            self._running = running
            self._waiting = waiting
            self._unread_tokens = pending_prefill_tokens

    def record_prefill(self, tokens: int, duration_s: float) -> None:
        """Note how long a piece of a prompt took."""
        with self._lock:
            self._reading.observe(tokens, duration_s)

    def record_decode(self, tokens_a_row: float, duration_s: float) -> None:
        """Note how long a round took, and what it brought each of its rows."""
        with self._lock:
            self._writing.observe(tokens_a_row, duration_s)

    def set_draft_tokens(self, settled: Sequence[int]) -> None:
        """Note how many tokens it pays to draft for 1, 2, 3 ... rows."""
        with self._lock:
            self._settled = tuple(settled)

    def report(self) -> LaneReport:
        """Return one consistent snapshot."""
        with self._lock:
            settled = self._settled if self.head_healthy else (0,) * self._slots
            return LaneReport(
                name=self._name,
                running=self._running,
                waiting=self._waiting,
                slots=self._slots,
                pending_prefill_tokens=self._unread_tokens,
                prefill_tokens_per_s=self._reading.tokens_s,
                decode_tokens_per_s=self._writing.tokens_s,
                mtp_enabled=self._requested_draft_tokens > 0,
                head_healthy=self.head_healthy,
                requested_draft_tokens=self._requested_draft_tokens,
                effective_draft_tokens=settled[min(max(self._running, 1), self._slots) - 1],
                draft_tokens_by_rows=settled,
                speculation=self._speculation,
                bypass_counts=dict(self._bypass),
                spec_prefill=self._spec_prefill,
                prefix=self._prefix,
                time_saved=TimeSaved(
                    decode_ms=round(self._decode_saved_s * 1000),
                    prefill_ms=round(self._prompt_saved_s * 1000),
                ),
                requests=self._requests,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._completion_tokens,
            )
