"""Decisions on the restart of a worker, with times that the test sets."""

from __future__ import annotations

import pytest

from gateway.cli.supervisor import GiveUp, Restart, RestartPolicy, Supervision, WorkerExit

POLICY = RestartPolicy(first_wait_s=0.5, growth=2, longest_wait_s=4, reset_after_s=60)


def worker_exit(*, uptime_s: float = 1, exit_code: int = -9, was_ready: bool = True) -> WorkerExit:
    return WorkerExit(
        started_mono_s=100, ended_mono_s=100 + uptime_s, exit_code=exit_code, was_ready=was_ready
    )


def restart_waits(*exits: WorkerExit) -> list[float]:
    supervision, waits = Supervision(policy=POLICY), []
    for exit_ in exits:
        supervision, step = supervision.after(exit_)
        assert isinstance(step, Restart)
        waits.append(step.wait_s)
    return waits


def test_waits_double_up_to_the_maximum() -> None:
    assert restart_waits(*[worker_exit()] * 6) == [0.5, 1, 2, 4, 4, 4]


def test_a_long_uptime_resets_the_wait() -> None:
    assert restart_waits(worker_exit(), worker_exit(), worker_exit(uptime_s=61), worker_exit()) == [
        0.5,
        1,
        0.5,
        1,
    ]


def test_a_long_loading_time_does_not_reset_the_wait() -> None:
    assert restart_waits(worker_exit(), worker_exit(uptime_s=600, was_ready=False)) == [0.5, 1]


@pytest.mark.parametrize("exit_code", [2, 3])
def test_a_worker_that_rejects_its_settings_is_not_restarted(exit_code: int) -> None:
    _, step = Supervision(policy=POLICY).after(worker_exit(exit_code=exit_code, was_ready=False))
    assert isinstance(step, GiveUp)


def test_a_worker_that_was_ready_before_is_restarted_after_a_rejection() -> None:
    supervision, _ = Supervision(policy=POLICY).after(worker_exit())
    _, step = supervision.after(worker_exit(exit_code=3, was_ready=False))
    assert isinstance(step, Restart)


def test_the_supervisor_gives_up_a_worker_that_is_never_ready() -> None:
    supervision, steps = Supervision(policy=POLICY), []
    for _ in range(POLICY.give_up_after):
        supervision, step = supervision.after(worker_exit(exit_code=1, was_ready=False))
        steps.append(type(step))
    assert steps == [Restart] * (POLICY.give_up_after - 1) + [GiveUp]


def test_the_supervisor_never_gives_up_a_worker_that_was_ready_once() -> None:
    assert (
        len(restart_waits(worker_exit(), *[worker_exit(exit_code=1, was_ready=False)] * 20)) == 21
    )
