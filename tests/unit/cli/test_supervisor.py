"""Decisions on the restart of a worker, with times that the test sets."""

import pytest

from gateway.cli.supervisor import GIVE_UP_AFTER, LONGEST_WAIT_S, Supervision


class Exits:
    def __init__(self) -> None:
        self.supervision = Supervision()
        self.waits_s: list[float] = []

    def record(
        self, *, uptime_s: float = 1, exit_code: int = -9, was_ready: bool = True, count: int = 1
    ) -> None:
        for _ in range(count):
            self.supervision.record_exit(exit_code, uptime_s=uptime_s, was_ready=was_ready)
            self.waits_s.append(self.supervision.wait_s)

    @property
    def given_up(self) -> bool:
        return bool(self.supervision.give_up_reason)


@pytest.fixture
def exits() -> Exits:
    return Exits()


def test_waits_double_up_to_the_maximum(exits: Exits) -> None:
    exits.record(count=9)
    assert exits.waits_s == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    exits.record(count=2000)
    assert exits.waits_s[-1] == LONGEST_WAIT_S


def test_a_long_uptime_resets_the_wait_and_a_long_loading_time_does_not(exits: Exits) -> None:
    exits.record(count=2)
    exits.record(uptime_s=60)
    exits.record(uptime_s=59)
    exits.record(uptime_s=600, was_ready=False)
    assert exits.waits_s == [0.5, 1, 0.5, 1, 2]


@pytest.mark.parametrize("exit_code", [2, 3])
def test_a_worker_that_rejects_its_settings_is_not_restarted(exits: Exits, exit_code: int) -> None:
    exits.record(exit_code=exit_code, was_ready=False)
    assert exits.given_up


@pytest.mark.parametrize("was_ready_once", [True, False])
def test_only_a_worker_that_is_never_ready_is_given_up(exits: Exits, was_ready_once: bool) -> None:
    exits.record(count=was_ready_once)
    exits.record(exit_code=1, was_ready=False, count=GIVE_UP_AFTER - 1)
    assert not exits.given_up
    exits.record(exit_code=1, was_ready=False)
    assert exits.given_up is not was_ready_once
    exits.record(exit_code=3, was_ready=False)
    assert exits.given_up is not was_ready_once
