"""The rule by which an answer takes tokens of its drafts."""

import mlx.core as mx
import pytest

from workers.engine.decode.step_graph import accept_drafts


@pytest.mark.parametrize(
    ("drafts", "limit", "chosen", "accepted"),
    [
        ([5, 6], 2, [5, 6, 7], 2),
        ([5, 9], 2, [5, 6, 7], 1),
        ([9, 6], 2, [5, 6, 7], 0),  # nothing after a rejected one counts
        ([5, 6], 1, [5, 6, 7], 1),  # the row has drafted one token
        ([5, 6], 0, [5, 6, 7], 0),
    ],
)
def test_drafts_that_equal_the_choices_are_accepted_up_to_the_first_that_does_not(
    drafts: list[int], limit: int, chosen: list[int], accepted: int
) -> None:
    other = mx.array([[1, 2], drafts]), mx.array([2, limit])
    counts, last_tokens = accept_drafts(*other, mx.array([[3, 3, 3], chosen]))
    assert counts.tolist() == [0, accepted]
    assert last_tokens.tolist() == [3, chosen[accepted]], "the target adds one token"
