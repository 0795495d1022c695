"""The measure of prose counts exactly the clauses that begin with a free relative."""

import pytest

from tools.prose import rate


@pytest.mark.parametrize(
    "page",
    [
        "Who stands in line stays there.",
        "The queue is full, and what comes gets 503.",
        "- Where no slot is free, it waits.",
        "| field | what it does |",
        "A request waits in the queue; those that time out get 503.",
    ],
)
def test_a_clause_that_begins_without_an_actor_counts(page: str) -> None:
    words = len(page.replace("|", "").replace("-", "").split())
    assert 1000 / rate(page) == pytest.approx(words, abs=1)


def test_no_other_clause_counts() -> None:
    for page in (
        "The worker that answered has the prompt, which the gateway records.",
        "The gateway reports the pool where a request ran.",
        "```\nwhat is code\n```\nThe rest is prose.",
        "The field `what` is a name.",
        "A sentence that goes on\nwhere a line ends is one.",
    ):
        assert rate(page) == 0, page
