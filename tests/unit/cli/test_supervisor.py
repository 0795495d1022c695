"""When a dead worker is started again: the decision alone, with a clock of our own."""

from __future__ import annotations

import pytest

from gateway.cli.supervisor import GiveUp, Restart, RestartPolicy, Supervision, WorkerExit

POLICY = RestartPolicy(first_wait_s=0.5, growth=2, longest_wait_s=4, reset_after_s=60)


def death(*, lived_s: float = 1, exit_code: int = -9, was_ready: bool = True) -> WorkerExit:
    return WorkerExit(
        started_mono_s=100, ended_mono_s=100 + lived_s, exit_code=exit_code, was_ready=was_ready
    )


def waits(*deaths: WorkerExit) -> list[float]:
    known, found = Supervision(policy=POLICY), []
    for each in deaths:
        known, step = known.after(each)
        assert isinstance(step, Restart)
        found.append(step.wait_s)
    return found


def test_waits_double_up_to_the_longest() -> None:
    assert waits(*[death()] * 6) == [0.5, 1, 2, 4, 4, 4]


def test_a_long_life_begins_the_waits_anew() -> None:
    assert waits(death(), death(), death(lived_s=61), death()) == [0.5, 1, 0.5, 1]


def test_a_long_wait_for_weights_is_no_long_life() -> None:
    assert waits(death(), death(lived_s=600, was_ready=False)) == [0.5, 1]


@pytest.mark.parametrize("exit_code", [2, 3])
def test_a_worker_that_refuses_at_once_is_not_started_again(exit_code: int) -> None:
    _, step = Supervision(policy=POLICY).after(death(exit_code=exit_code, was_ready=False))
    assert isinstance(step, GiveUp)


def test_a_refusal_after_a_good_life_is_worth_another_try() -> None:
    known, _ = Supervision(policy=POLICY).after(death())
    _, step = known.after(death(exit_code=3, was_ready=False))
    assert isinstance(step, Restart)


def test_a_worker_that_never_gets_ready_is_given_up() -> None:
    known, steps = Supervision(policy=POLICY), []
    for _ in range(POLICY.give_up_after):
        known, step = known.after(death(exit_code=1, was_ready=False))
        steps.append(type(step))
    assert steps == [Restart] * (POLICY.give_up_after - 1) + [GiveUp]


def test_a_worker_that_was_ready_once_is_never_given_up() -> None:
    assert len(waits(death(), *[death(exit_code=1, was_ready=False)] * 20)) == 21
