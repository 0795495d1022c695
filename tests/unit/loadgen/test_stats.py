"""Metrics of known answers, to the digit."""

import numpy as np
import pytest
from hypothesis import example, given
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
    kinds = ("mean", "median", "std", "p90", "p99")
    times_ms = {
        "ttft": (750.0, 750.0, 250.0, 950.0, 995.0),
        "tpot": (625.0, 625.0, 375.0, 925.0, 992.5),
        "itl": (750.0, 750.0, 204.124145, 950.0, 995.0),
        "e2el": (2500.0, 2500.0, 500.0, 2900.0, 2990.0),
    }
    assert {name: round(value, 6) for name, value in metrics.items() if type(value) is float} == {
        "duration": 4.0,
        "request_throughput": 0.5,
        "output_throughput": 2.0,
        "total_token_throughput": 4.5,
        "max_output_tokens_per_s": 4.0,
        "client_busy": 0.0,
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.0,
        **{
            f"{kind}_{name}_ms": value
            for name, values in times_ms.items()
            for kind, value in zip(kinds, values, strict=True)
        },
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
    metrics = summarize([Answer(due_s=0, ended_s=2, pieces_s=(1.0,), output_tokens=1)])
    assert not [name for name in metrics if "tpot" in name], "of a single token"
    spread_of_one = [metrics[f"{kind}_ttft_ms"] for kind in ("mean", "median", "std", "p90", "p99")]
    assert spread_of_one == [1000.0, 1000.0, 0.0, 1000.0, 1000.0]


def test_drafts_of_answers_take_precedence_over_the_counters_of_the_server() -> None:
    counters = Drafts(steps=100, drafted=200, accepted=200, per_position=(100, 100))
    plain = Answer(due_s=0, ended_s=1, pieces_s=(0.5,), output_tokens=2)
    for answer, drafts, counted_by in ((FIRST, 2, "answers"), (plain, 100, "server")):
        metrics = summarize([answer], counters=counters)
        assert metrics["spec_decode_num_drafts"] == drafts
        assert metrics["spec_decode_counted_by"] == counted_by
    never_drafted = summarize([plain], counters=Drafts())
    assert not [name for name in never_drafted if "spec_decode" in name]


def test_the_busiest_second_counts_tokens_and_concurrent_requests_overlap() -> None:
    drafted = Answer(due_s=0, ended_s=3, pieces_s=(0.5, 1.1, 1.9, 2.0), output_tokens=12)
    concurrent = Answer(due_s=0.5, ended_s=3, pieces_s=(2.2,), output_tokens=4)
    for answers, tokens in (([drafted], 6), ([drafted, concurrent], 7), ([], 0)):
        assert busiest_second(answers) == tokens
    assert summarize([drafted, FAILED])["max_output_tokens_per_s"] == 6
    brief = Answer(due_s=0, ended_s=0.5, pieces_s=(0.1, 0.4), output_tokens=80)
    assert summarize([brief])["max_output_tokens_per_s"] == 160, "no peak is below the mean"
    in_turn = [Answer(due_s=begin, ended_s=begin + 1) for begin in (0, 1, 2)]
    assert peak_concurrency(in_turn) == 1, "one begins as another ends"
    assert peak_concurrency([*in_turn, Answer(due_s=0.5, ended_s=1.5)]) == 2


@given(st.lists(st.floats(0, 1e6), min_size=1))
@example([4.0, 1.0, 3.0, 2.0])
def test_percentiles_match_numpy(times_s: list[float]) -> None:
    metrics = spread("x", times_s)
    found = [metrics[f"{kind}_x_ms"] for kind in ("median", "p90", "p99")]
    assert found == pytest.approx([*np.percentile(times_s, [50, 90, 99]) * 1e3])
