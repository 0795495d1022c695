"""What workers report, for `/metrics`: a line for each worker and model, none for all of them.

Readers sum lines, so there is no line that is the sum of others. The first four have vLLM's names:
`vllm bench serve` and AIPerf read acceptance from them as they do from vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.protocol import LaneReport, PrefixCounts, SavedTime, Speculation, WorkerReport

_LABELS = ("model_name", "worker")


class WorkerFigures(Collector):
    """Sums over all boots, so that a worker that starts anew does not go back to nothing."""

    def __init__(self, reports: Iterable[WorkerReport]) -> None:
        self._lanes: dict[tuple[str, str], list[LaneReport]] = {}
        for report in reports:
            lanes = self._lanes.setdefault((report.model, report.worker_id), [])
            lanes.extend(report.lanes)

    def collect(self) -> Iterator[Metric]:
        """Give one family for each figure."""
        yield from self._drafts()
        yield from self._prefixes()

    def _drafts(self) -> Iterator[Metric]:
        drafts = CounterMetricFamily(
            "vllm:spec_decode_num_drafts", "Verifies of drafts.", labels=_LABELS
        )
        drafted = CounterMetricFamily(
            "vllm:spec_decode_num_draft_tokens", "Tokens drafted.", labels=_LABELS
        )
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", labels=_LABELS
        )
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            labels=[*_LABELS, "position"],
        )
        for key, lanes in sorted(self._lanes.items()):
            drafting = [lane.speculation for lane in lanes if lane.mtp_enabled]
            if drafting:
                total = sum(drafting, Speculation())
                drafts.add_metric(key, total.steps)
                drafted.add_metric(key, total.drafted)
                accepted.add_metric(key, total.accepted)
                for position, count in enumerate(total.accepted_per_position):
                    by_position.add_metric([*key, str(position)], count)
        yield from (drafts, drafted, accepted, by_position)

    def _prefixes(self) -> Iterator[Metric]:
        hits = _counter("prefix_hits", "Prompts whose system prompt was read before.")
        misses = _counter("prefix_misses", "Prompts whose system prompt had to be read.")
        cached = _counter("prefix_cached_tokens", "Prompt tokens that were not read again.")
        reading = _counter("prefix_saved_seconds", "Time that reading them again would have taken.")
        decoding = GaugeMetricFamily(  # it falls where drafting costs more than it brings
            "paceline_worker_drafting_saved_seconds",
            "Time that drafting has saved so far, less what it has cost.",
            labels=_LABELS,
        )
        for key, lanes in sorted(self._lanes.items()):
            prefix = sum((lane.prefix for lane in lanes), PrefixCounts())
            saved = sum((lane.saved for lane in lanes), SavedTime())
            hits.add_metric(key, prefix.hits)
            misses.add_metric(key, prefix.misses)
            cached.add_metric(key, prefix.cached_tokens)
            reading.add_metric(key, saved.prompt_ms / 1000)
            decoding.add_metric(key, saved.decode_ms / 1000)
        yield from (hits, misses, cached, reading, decoding)


def _counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"paceline_worker_{name}", text, labels=_LABELS)
