"""The measure of prose counts exactly the clauses that begin with a free relative."""

from __future__ import annotations

import pytest

from tools.prose import rate


@pytest.mark.parametrize(
    ("page", "clauses"),
    [
        ("Who stands in line stays there.", 1),
        ("The queue is full, and what comes gets 503.", 1),
        ("- Where no slot is free, it waits.", 1),
        ("| field | what it does |", 1),
        ("A request waits in the queue; those that time out get 503.", 1),
        ("The worker that answered has the prompt, which the gateway records.", 0),
        ("The gateway reports the pool where a request ran.", 0),
        ("```\nwhat is code\n```\nThe rest is prose.", 0),
        ("The field `what` is a name.", 0),
        ("A sentence that goes on\nwhere a line ends is one.", 0),
    ],
)
def test_only_clauses_that_begin_without_an_actor_count(page: str, clauses: int) -> None:
    words = 1000 / rate(page) if clauses else 0
    assert (rate(page) > 0) == bool(clauses)
    if clauses:
        assert words == pytest.approx(len(page.replace("|", "").replace("-", "").split()), abs=1)
