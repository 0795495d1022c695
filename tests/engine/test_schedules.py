"""Random schedules of a lane: whatever joins, leaves and shares the batch, each row is alone."""

import random

import pytest

from tests.engine.reference import greedy_alone, near_tie
from workers.engine.requests import Finished


def random_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(20, 1000) for _ in range(rng.choice([1, 2, 7, 30, 90, 200]))]


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_every_row_its_answer_and_its_counts(
    checkpoint, make_lane, ask, seed
) -> None:
    rng = random.Random(seed)
    lane = make_lane(
        draft_tokens=rng.randint(1, 4),
        max_rows=rng.randint(2, 8),
        chunk_tokens=rng.choice([32, 512]),
    )
    heard = []
    to_come = 24
    while to_come or lane.busy:
        if to_come and rng.random() < 0.35:
            to_come -= 1
            heard.append(
                ask(
                    lane,
                    random_prompt(rng),
                    max_tokens=rng.randint(1, 40),
                    draft_tokens=rng.randint(0, 4),
                )
            )
        running = [one for one in heard if one.end is None and not one.row.cancelled]
        if running and rng.random() < 0.03:
            rng.choice(running).row.cancelled = True
        lane.step()

    for one in heard:
        prompt, answer = one.row.prompt.tokens, one.row.answer
        alone = greedy_alone(checkpoint, prompt, one.row.max_tokens)
        if one.row.cancelled:
            alone = alone[: len(answer)]
        else:
            assert isinstance(one.end, Finished)
        assert answer == alone or near_tie(checkpoint, prompt, answer, alone)
        counts = one.row.tally.total()
        assert counts.accepted <= max(len(answer) - 1, 0)
        assert counts.drafted == counts.accepted + counts.rejected + counts.errors
    assert lane.counters.report().requests == len(heard)
