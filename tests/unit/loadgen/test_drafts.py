"""Draft statistics from answers and from the counters of a server."""

from typing import Any

import pytest

from gateway.loadgen.drafts import Drafts

EXPOSITION = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m",engine="0"} 10.0
vllm:spec_decode_num_drafts_total{model_name="m",engine="1"} 5.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 2.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
# TYPE something_else gauge
something_else 3.0
"""


def test_counters_are_summed_over_their_labels() -> None:
    drafts = Drafts.of_exposition(EXPOSITION)
    assert drafts == Drafts(steps=15, drafted=30, accepted=12, per_position=(8, 4))
    assert drafts.acceptance_rate == 0.4
    assert drafts.acceptance_length == 1.8
    assert drafts.rate_per_position == (8 / 15, 4 / 15)


@pytest.mark.parametrize("text", ["", "something_else 3.0\n", "{{{", "<html>not metrics</html>"])
def test_an_exposition_without_draft_counters_gives_no_drafts(text: str) -> None:
    assert Drafts.of_exposition(text) is None


def test_the_drafts_between_two_readings_are_the_difference() -> None:
    before = Drafts(steps=10, drafted=20, accepted=5, per_position=(4, 1))
    after = Drafts(steps=12, drafted=26, accepted=9, per_position=(6, 2, 1))
    assert after.since(before) == Drafts(steps=2, drafted=6, accepted=4, per_position=(2, 1, 1))
    assert before + after.since(before) == after


COUNTS = dict.fromkeys(("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"), 1)


@pytest.mark.parametrize(
    "metrics",
    [
        *(None, {}, []),
        *(
            {"speculative_decoding": given}
            for given in (None, {"num_spec_steps": 1}, COUNTS | {"acceptance_histogram": ["1"]})
        ),
    ],
)
def test_metrics_of_another_shape_give_no_drafts(metrics: Any) -> None:
    assert Drafts.of_answer({"metrics": metrics}) is None


def test_rates_without_drafts_divide_by_no_zero() -> None:
    no_drafts = Drafts(per_position=(0,))
    assert (no_drafts.acceptance_rate, no_drafts.acceptance_length) == (0.0, 1.0)
    assert no_drafts.rate_per_position == (0.0,)
