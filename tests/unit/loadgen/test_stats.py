"""Metrics of known answers, to the digit."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.loadgen.client import Answer
from gateway.loadgen.drafts import Drafts
from gateway.loadgen.stats import busiest_second, peak_concurrency, spread, summarize

FIRST = Answer(
    due_s=10.0,
    ended_s=12.0,
    pieces_s=(10.5, 11.0, 11.75),
    input_tokens=7,
    output_tokens=6,
    drafts=Drafts(steps=2, drafted=4, accepted=3, per_position=(2, 1)),
)
SECOND = Answer(
    due_s=11.0,
    ended_s=14.0,
    pieces_s=(12.0, 13.0),
    input_tokens=3,
    output_tokens=2,
    drafts=Drafts(steps=1, drafted=2, accepted=0, per_position=(0, 0)),
)
FAILED = Answer(due_s=11.5, ended_s=14.5, problem="503: no worker")


def test_known_answers_give_known_metrics() -> None:
    metrics = summarize([FIRST, SECOND])
    assert {name: round(value, 6) for name, value in metrics.items() if type(value) is float} == {
        "duration": 4.0,
        "request_throughput": 0.5,
        "output_throughput": 2.0,
        "total_token_throughput": 4.5,
        "max_output_tokens_per_s": 4.0,
        "client_busy": 0.0,
        "mean_ttft_ms": 750.0,
        "median_ttft_ms": 750.0,
        "std_ttft_ms": 250.0,
        "p90_ttft_ms": 950.0,
        "p99_ttft_ms": 995.0,
        "mean_tpot_ms": 625.0,
        "median_tpot_ms": 625.0,
        "std_tpot_ms": 375.0,
        "p90_tpot_ms": 925.0,
        "p99_tpot_ms": 992.5,
        "mean_itl_ms": 750.0,
        "median_itl_ms": 750.0,
        "std_itl_ms": 204.124145,
        "p90_itl_ms": 950.0,
        "p99_itl_ms": 995.0,
        "mean_e2el_ms": 2500.0,
        "median_e2el_ms": 2500.0,
        "std_e2el_ms": 500.0,
        "p90_e2el_ms": 2900.0,
        "p99_e2el_ms": 2990.0,
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.0,
    }
    assert metrics["spec_decode_per_position_acceptance_rates"] == [2 / 3, 1 / 3]
    assert (metrics["spec_decode_num_drafts"], metrics["spec_decode_accepted_tokens"]) == (3, 3)
    assert (metrics["total_input_tokens"], metrics["total_output_tokens"]) == (10, 8)
    assert metrics["max_concurrent_requests"] == 2


def test_a_failed_request_counts_as_failed_and_affects_no_latency() -> None:
    metrics = summarize([FIRST, FAILED])
    assert (metrics["completed"], metrics["failed"], metrics["total_output_tokens"]) == (1, 1, 6)
    assert metrics.items() >= spread("ttft", [0.5]).items()
    assert metrics["duration"] == 4.5, "the failed request still extends the duration"


def test_metrics_without_measurements_are_omitted() -> None:
    metrics = summarize([FAILED])
    assert metrics["completed"] == 0
    assert not [name for name in metrics if "ttft" in name or "spec_decode" in name]


def test_a_single_token_has_no_time_per_output_token() -> None:
    answer = Answer(due_s=0, ended_s=2, pieces_s=(1.0,), output_tokens=1)
    metrics = summarize([answer])
    assert not [name for name in metrics if "tpot" in name]
    spread_of_one = [metrics[f"{kind}_ttft_ms"] for kind in ("mean", "median", "std", "p90", "p99")]
    assert spread_of_one == [1000.0, 1000.0, 0.0, 1000.0, 1000.0]


def test_drafts_of_answers_take_precedence_over_the_counters_of_the_server() -> None:
    counters = Drafts(steps=100, drafted=200, accepted=200, per_position=(100, 100))
    metrics = summarize([FIRST], counters=counters)
    assert (metrics["spec_decode_num_drafts"], metrics["spec_decode_counted_by"]) == (2, "answers")
    without_drafts = Answer(due_s=0, ended_s=1, pieces_s=(0.5,), output_tokens=2)
    metrics = summarize([without_drafts], counters=counters)
    assert (metrics["spec_decode_num_drafts"], metrics["spec_decode_counted_by"]) == (100, "server")
    never_drafted = summarize([without_drafts], counters=Drafts())
    assert not [name for name in never_drafted if "spec_decode" in name]


def test_the_busiest_second_counts_tokens_and_not_pieces() -> None:
    drafted = Answer(due_s=0, ended_s=3, pieces_s=(0.5, 1.1, 1.9, 2.0), output_tokens=12)
    assert busiest_second([drafted]) == 6
    concurrent = Answer(due_s=0.5, ended_s=3, pieces_s=(2.2,), output_tokens=4)
    assert busiest_second([drafted, concurrent]) == 7
    assert summarize([drafted, FAILED])["max_output_tokens_per_s"] == 6
    assert busiest_second([]) == 0


def test_a_request_that_begins_as_another_ends_is_not_concurrent() -> None:
    answers = [Answer(due_s=begin, ended_s=begin + 1) for begin in (0, 1, 2)]
    assert peak_concurrency(answers) == 1
    assert peak_concurrency([*answers, Answer(due_s=0.5, ended_s=1.5)]) == 2


def test_percentiles_match_numpy() -> None:
    metrics = spread("x", [4.0, 1.0, 3.0, 2.0])
    percentiles = [round(metrics[f"{kind}_x_ms"], 6) for kind in ("median", "p90", "p99")]
    assert percentiles == [2500.0, 3700.0, 3970.0]


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_ordered_and_within_the_times(times_s: list[float]) -> None:
    metrics = spread("x", times_s)
    percentiles = [metrics[f"{kind}_x_ms"] for kind in ("median", "p90", "p99")]
    ordered = [min(times_s) * 1e3, *percentiles, max(times_s) * 1e3]
    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(ordered))
