"""Periodic jobs: each runs by itself, and a failure is logged once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.errors import RecordsUnwritable
from gateway.periodic import Job, periodic_tasks
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import RunningGateway, make_settings


class Work:
    """Fails by a plan: an error, or None, for each turn; then well for ever."""

    def __init__(self, *plan: Exception | None) -> None:
        self._plan = list(plan)
        self.done = asyncio.Event()

    async def turn(self) -> None:
        if not self._plan:
            self.done.set()
        elif (fault := self._plan.pop(0)) is not None:
            raise fault

    async def hang(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (RuntimeError("odd"), "job.failed job=Work.turn"),
        (RecordsUnwritable(), "records.unwritable job=Work.turn"),
    ],
)
async def test_a_fault_is_told_once_until_it_is_well_again(
    caplog: pytest.LogCaptureFixture, fault: Exception, told: str
) -> None:
    work = Work(*[fault] * 3, None, *[fault] * 3)
    async with periodic_tasks([Job(work=work.turn, period_s=0.001)]):
        await asyncio.wait_for(work.done.wait(), 10)
    assert [one.getMessage() for one in caplog.records] == [told] * 2


async def test_what_is_told_elsewhere_is_not_told_again(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(RecordsUnwritable())
    job = Job(work=work.turn, period_s=0.001, silent_errors=(RecordsUnwritable,))
    async with periodic_tasks([job]):
        await asyncio.wait_for(work.done.wait(), 10)
    assert not caplog.records


async def test_a_work_that_hangs_holds_up_no_other() -> None:
    work = Work()
    jobs = [Job(work=one, period_s=0.001) for one in (work.hang, work.turn)]
    async with periodic_tasks(jobs):
        await asyncio.wait_for(work.done.wait(), 10)


@pytest.mark.parametrize("shared", [False, True], ids=["in a file", "over Redis"])
def test_nothing_is_asked_twice_of_what_gateways_share(
    tmp_path: Path, redis: RedisServer, shared: bool
) -> None:
    url = SecretStr(redis.url) if shared else None
    with RunningGateway(make_settings(tmp_path, redis_url=url)) as gateway:
        names = [
            task.get_name()
            for task in asyncio.all_tasks(gateway.loop)
            if task.get_name().startswith("job ")
        ]
    assert len(names) == len(set(names))
    assert {"job KeyStore.refresh", "job Cordons.refresh", "job PolicyStore.refresh"} <= {*names}
