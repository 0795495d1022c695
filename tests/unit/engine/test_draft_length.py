"""What a step drafts, by the measured costs and the promised tokens."""

from collections.abc import Mapping, Sequence

from workers.engine.decode.draft_length import (
    MEASURE_EVERY,
    MIN_SAMPLES,
    PROBE_EVERY,
    PROBE_STEPS,
    RUN_LENGTHS,
    TRY_EVERY,
    Accepted,
    DraftLength,
    Plan,
    Run,
)

NEW: list[Accepted] = [[]]
"""A batch of one row that has drafted nothing yet."""


def measured(
    rows: int, costs_s: Mapping[int, float], *, draft_tokens: int, has_head: bool = True
) -> DraftLength:
    lengths = DraftLength(draft_tokens, RUN_LENGTHS, has_head=has_head)
    for length, cost_s in costs_s.items():
        observe(lengths, rows, length, cost_s, head_tokens=min(length, draft_tokens))
    return lengths


def observe(
    lengths: DraftLength, rows: int, length: int, cost_s: float, *, head_tokens: int = 0
) -> None:
    for _ in range(MIN_SAMPLES):
        lengths.observe_cost(rows, length, cost_s, head_tokens=head_tokens)


def forced(tokens: int) -> Run:
    return Run(range(tokens), tokens)


def plan(lengths: DraftLength, k: int, runs: Sequence[Run | None]) -> Plan:
    return lengths.plan(k, runs, NEW * len(runs))


def test_a_forced_draft_is_as_long_as_it_pays() -> None:
    """A length is used where it is estimated to pay, and then where it has been measured to."""
    lengths = measured(1, {0: 1.0, 1: 1.2, 2: 1.4}, draft_tokens=2)
    assert plan(lengths, 0, [forced(9)]) == Plan(0, 8, (True,)), "9 tokens for 1.8 steps"
    observe(lengths, 1, 8, 4.0)
    assert plan(lengths, 0, [forced(9)]) == Plan(0, 4, (True,)), "estimated"
    observe(lengths, 1, 4, 1.6)
    observe(lengths, 1, 2, 1.3)
    assert plan(lengths, 0, [forced(9)]).run_tokens == 4
    assert plan(lengths, 2, [forced(9)]) == Plan(0, 4, (True,)), "the head does not run"
    assert plan(lengths, 2, [None]) == Plan(2, 0, (False,))
    assert plan(lengths, 2, [forced(1)]) == Plan(2, 0, (False,))


def test_a_run_counts_what_the_other_rows_lose() -> None:
    """A wide verify for one of eight rows costs all of them; for all of them it pays."""
    lengths = measured(8, {0: 1.0}, draft_tokens=0)
    observe(lengths, 8, 4, 3.0)
    assert plan(lengths, 0, [forced(4), *[None] * 7]).run_tokens == 0
    assert plan(lengths, 0, [forced(4)] * 8).run_tokens == 4


def test_a_row_drafts_its_run_only_where_it_promises_more_than_the_head() -> None:
    lengths = measured(2, {0: 1.0, 1: 1.1, 2: 1.2}, draft_tokens=2)
    observe(lengths, 2, 4, 1.3, head_tokens=2)
    observe(lengths, 2, 4, 1.3, head_tokens=0)
    doubtful, likely = Run(range(4), 0, 0.3), Run(range(4), 0, 0.95)
    assert plan(lengths, 2, [doubtful, likely]) == Plan(2, 4, (False, True))
    assert plan(lengths, 2, [doubtful, doubtful]) == Plan(2, 0, (False, False))


def test_the_head_does_not_run_for_the_rows_without_a_run_where_that_costs_more() -> None:
    lengths = measured(2, {0: 1.0, 1: 1.1, 2: 1.2}, draft_tokens=2)
    observe(lengths, 2, 4, 2.0, head_tokens=2)
    observe(lengths, 2, 4, 1.2, head_tokens=0)
    run = Run(range(4), 0, 0.95)
    assert plan(lengths, 2, [run, None]) == Plan(0, 4, (True, False))
    for _ in range(2):
        observe(lengths, 2, 4, 1.9, head_tokens=0)
        observe(lengths, 2, 2, 1.9, head_tokens=0)
    assert plan(lengths, 2, [run, None]) == Plan(2, 2, (True, False))


def test_a_run_is_drafted_at_once_and_a_plain_step_now_and_then_until_its_cost_is_known() -> None:
    lengths = DraftLength(2, RUN_LENGTHS, has_head=False)
    run = [Run(range(8), 0, 0.9)]
    planned = [plan(lengths, 0, run).run_tokens for _ in range(2 * TRY_EVERY)]
    assert planned == [8] * (TRY_EVERY - 1) + [0] * PROBE_STEPS + [8] * 12 + [0]
    observe(lengths, 1, 0, 1.0)
    assert 0 not in [plan(lengths, 0, [forced(8)]).run_tokens for _ in range(TRY_EVERY)]
    assert Run(range(4), 2, 0.5).expected_tokens(8) == 1 + 1 + 1 + 0.5 + 0.25


def test_a_cost_that_is_not_measured_is_estimated_from_the_nearest_one_that_is() -> None:
    """A batch of another size drafts as this one does, with no step in vain."""
    for head_costs, k in (({0: 1.0, 1: 1.2, 2: 1.4}, 2), ({0: 1.0, 1: 3.0, 2: 5.0}, 0)):
        lengths = measured(4, head_costs, draft_tokens=2)
        lengths.choose(NEW * 4)
        assert lengths.choose(NEW * 4) == k
    lengths = measured(3, {2: 1.0}, draft_tokens=2)
    chosen = [lengths.choose(NEW * count) for count in (3, 4, 5)]
    assert chosen == [2] * 3
    observe(lengths, 3, 0, 0.1)
    assert lengths.choose(NEW * 3) == 0


def test_the_head_promises_what_a_row_has_accepted_and_its_lane() -> None:
    lengths = DraftLength(2)
    poem: Accepted = []
    table: Accepted = []
    for _ in range(12):
        lengths.observe_acceptance(2, 0, poem)
        lengths.observe_acceptance(2, 2, table)
    of_poem, of_lane, of_table = map(lengths.promised_tokens, (poem, (), table))
    assert of_poem[0] == of_table[0] == 1.0
    assert of_poem[2] < 1.5 < of_lane[2] < 2.5 < of_table[2]
    for head_tokens, length in ((0, 0), (2, 2), (0, 2)):
        observe(lengths, 2, length, 1.0, head_tokens=head_tokens)
    run = [Run(range(2), 0, 0.6)] * 2
    assert lengths.plan(2, run, [poem, table]).uses_run == (True, False)
    for _ in range(400):
        lengths.forget([poem])
    assert lengths.promised_tokens(poem)[2] > 2, "what a row accepted long ago is forgotten"


def test_an_unpredictable_answer_is_drafted_again_now_and_then_as_it_may_have_changed() -> None:
    lengths = measured(1, {0: 1.0, 1: 1.2, 2: 1.4}, draft_tokens=2)
    row: Accepted = []
    drafted = ""
    for _ in range(PROBE_EVERY - PROBE_STEPS):
        k = lengths.choose([row])
        drafted += str(min(k, 1))
        if k:
            lengths.observe_acceptance(k, 0, row)
        else:
            lengths.forget([row])
    rest = drafted[32:]
    assert drafted.index("0") < 32
    assert 8 < max(map(len, rest.split("1"))) < 32
    assert rest.count("1") < 0.4 * len(rest)


def test_a_length_that_did_not_pay_is_tried_again_later() -> None:
    lengths = measured(1, {0: 1.0}, draft_tokens=0, has_head=False)
    for length in RUN_LENGTHS:
        observe(lengths, 1, length, 9.0)
    run = [Run(range(8), 0, 0.8)]
    planned = [plan(lengths, 0, run).run_tokens for _ in range(4 * PROBE_EVERY)]
    assert planned[: PROBE_EVERY - 1] == [0] * (PROBE_EVERY - 1)
    assert set(planned) == {0, *RUN_LENGTHS}
    assert sum(tokens > 0 for tokens in planned) <= 3 * PROBE_STEPS


def test_the_measured_gain_of_drafts_is_that_of_the_best_length() -> None:
    lengths = measured(1, {0: 1.0, 1: 1.1, 2: 1.2}, draft_tokens=2)
    assert lengths.speedup(1) == 0, "nothing is chosen yet"
    assert lengths.choose(NEW) == 2
    assert lengths.speedup(1) == lengths.promised_tokens()[2] / 1.2
    assert lengths.speedup(2) == 0
    slow = measured(1, {0: 1.0, 1: 4.0, 2: 9.0}, draft_tokens=2)
    assert slow.choose(NEW) == 0
    assert slow.speedup(1) == 1.0
    assert measured(1, {0: 1.0}, draft_tokens=0, has_head=False).speedup(1) == 0


def test_a_lane_without_a_head_reports_whether_a_run_can_pay() -> None:
    lengths = measured(1, {0: 1.0}, draft_tokens=2, has_head=False)
    assert lengths.best(1) == lengths.best(8) == 2, "nothing is measured"
    for length in (2, *RUN_LENGTHS):
        observe(lengths, 1, length, 2.0 * (length + 1))
    assert (lengths.best(1), lengths.best(8)) == (0, 2)


def test_a_run_pays_while_its_tokens_are_faster_than_plain_steps() -> None:
    for cost_s, best in ((8.9, 2), (9.0, 0), (9.1, 0)):
        lengths = measured(1, {0: 1.0, 2: 99.0, 4: 99.0}, draft_tokens=2, has_head=False)
        for length in (2, 4):
            observe(lengths, 1, length, 99.0)
        assert lengths.best(1) == 2, "the longest run is not measured"
        observe(lengths, 1, 8, cost_s)
        assert lengths.best(1) == best


def test_beside_other_batches_a_cost_is_measured_until_it_is_known_and_then_now_and_then() -> None:
    lengths = measured(2, {0: 1.0}, draft_tokens=2)
    assert lengths.wants_sample(2, Plan(2)), "unknown"
    assert not lengths.wants_sample(2, Plan(0))
    for _ in range(MEASURE_EVERY):
        assert not lengths.wants_sample(2, Plan(0))
        lengths.skip_cost()
    assert lengths.wants_sample(2, Plan(0))
    lengths.observe_cost(2, 0, 1.0)
    assert not lengths.wants_sample(2, Plan(0))
