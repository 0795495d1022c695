"""What happened in a window, for any part of the fleet: the `recent` blocks of `/v1/status`."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from gateway import status_figures as told
from gateway.buckets import NONE, Counts, percentile
from gateway.errors import FieldInvalid
from gateway.telemetry.stats import Figures, Place, total
from gateway.windows import LONGEST_S, STEP_S, Windows

DEFAULT_WINDOW = "5m"
_WINDOW = re.compile(r"([1-9][0-9]{0,4})(s|m)")
_SECONDS = {"s": 1.0, "m": 60.0}


def window_s(text: str) -> float:
    """Read a window, as 90s or 5m; raise `FieldInvalid` for what is none, or is not kept."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not STEP_S <= seconds <= LONGEST_S:
        raise FieldInvalid(
            f"'window' must be a time from {STEP_S:.0f}s to {LONGEST_S / 60:.0f}m, as 90s or 5m.",
            param="window",
        )
    return seconds


class Recently:
    """One window up to now; all that it tells is of the same two moments."""

    def __init__(self, windows: Windows, asked_s: float) -> None:
        now = windows.latest()
        self._steps = windows.reach_back(now, asked_s)
        self._now_s = now.at_s
        self._seconds = now.at_s - self._steps[0].at_s
        self._places = now.since(self._steps[0])
        self._everywhere = now.everywhere.since(self._steps[0].everywhere)
        self.window = told.Window(
            asked_s=asked_s, covered_s=round(self._seconds, 3), longest_s=LONGEST_S
        )

    def of_all(self, mtp: told.Mtp) -> told.Recent:
        """Tell what all requests came to; `mtp` is of all lanes."""
        return self._recent(self._everywhere, mtp)

    def of(self, chosen: Callable[[Place], bool], mtp: told.Mtp) -> told.Recent:
        """Tell what the requests of these places came to; `mtp` is of the lanes there."""
        places = (one for place, one in self._places.items() if chosen(place))
        return self._recent(total(places), mtp)

    def _recent(self, figures: Figures, mtp: told.Mtp) -> told.Recent:
        return told.Recent(
            requests=figures.requests,
            failed=figures.failed,
            prompt_tokens=figures.prompt_tokens,
            completion_tokens=figures.completion_tokens,
            cached_tokens=figures.cached_tokens,
            tokens_per_s=_a_second(figures.completion_tokens, self._seconds),
            first_token_s=_spread(figures.first_token_s),
            token_s=_spread(figures.token_s),
            request_tokens_per_s=_speeds(figures.token_s),
            wait_s=_spread(figures.wait_s),
            answer_s=_spread(figures.answer_s),
            reasons=dict(sorted(figures.reasons.items())),
            prefix=told.PrefixResults(
                hit=figures.prefix.get("hit", 0),
                miss=figures.prefix.get("miss", 0),
                none=figures.prefix.get("none", 0),
            ),
            mtp=_drafts(figures, mtp),
        )

    def added_s(self) -> told.Percentiles:
        """Tell what this gateway itself added to requests."""
        return _spread(self._everywhere.added_s)

    def history(self) -> tuple[told.Point, ...]:
        """Tell of the window step by step, oldest first."""
        points = []
        for then, now in pairwise(self._steps):
            figures = now.everywhere.since(then.everywhere)
            seconds = now.at_s - then.at_s
            points.append(
                told.Point(
                    ago_s=round(self._now_s - now.at_s, 3),
                    seconds=round(seconds, 3),
                    requests=figures.requests,
                    tokens_per_s=_a_second(figures.completion_tokens, seconds),
                    first_token_s=_spread(figures.first_token_s),
                    answer_s=_spread(figures.answer_s),
                    drafts=figures.drafts,
                    attempted=figures.drafted,
                    accepted=figures.accepted,
                    acceptance_rate=_share(figures.accepted, figures.drafted),
                )
            )
        return tuple(points)


def _drafts(figures: Figures, mtp: told.Mtp) -> told.Mtp:
    """Tell what drafting did, as the workers' answers said."""
    lanes = mtp if isinstance(mtp, told.MtpOn) else None
    if lanes is None and not figures.drafts:
        return told.MtpOff(enabled=False)
    longest = max(figures.histogram, default=0)
    if lanes is not None:
        longest = max(longest, lanes.requested_draft_tokens)
    by_accepted = [figures.histogram.get(count, 0) for count in range(longest + 1)]
    return told.MtpOn(
        enabled=True,
        requested_draft_tokens=lanes.requested_draft_tokens if lanes else longest,
        effective_draft_tokens=lanes.effective_draft_tokens if lanes else longest,
        drafts=figures.drafts,
        attempted=figures.drafted,
        accepted=figures.accepted,
        rejected=figures.drafted - figures.accepted,
        errors=0,
        acceptance_rate=_share(figures.accepted, figures.drafted),
        mean_acceptance_length=1.0 + (figures.accepted / figures.drafts if figures.drafts else 0.0),
        acceptance_rate_per_position=tuple(
            _share(sum(by_accepted[position + 1 :]), figures.drafts) for position in range(longest)
        ),
        bypass_counts=dict(sorted(figures.bypass.items())),
    )


def _spread(counts: Counts) -> told.Percentiles:
    if counts is NONE:
        return _NO_VALUES
    return told.Percentiles(
        count=sum(counts), p50=percentile(counts, 0.5), p95=percentile(counts, 0.95)
    )


def _speeds(token_s: Counts) -> told.Percentiles:
    """Turn seconds a token into tokens a second: who is fastest took the least time."""
    slow_s, fast_s = percentile(token_s, 0.5), percentile(token_s, 0.05)
    return told.Percentiles(count=sum(token_s), p50=_a_second(1, slow_s), p95=_a_second(1, fast_s))


def _a_second(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole else 0.0


_NO_VALUES = told.Percentiles(count=0, p50=0.0, p95=0.0)
