"""Periodic jobs: they run independently, and a repeated error is logged once."""

import asyncio
import ctypes
import subprocess
import sys
import threading

import pytest
from pydantic import SecretStr

from gateway import assembly
from gateway.errors import RecordsUnwritable
from gateway.periodic import Job, periodic_tasks
from tests.support.running_gateway import RunningGateway, make_settings


class PlannedWork:
    """Work with a planned outcome per run, an error or success, and success afterwards."""

    def __init__(self, *plan: Exception | None) -> None:
        self._plan = list(plan)
        self.done = asyncio.Event()

    async def run(self) -> None:
        if not self._plan:
            self.done.set()
        elif (fault := self._plan.pop(0)) is not None:
            raise fault

    async def hang(self) -> None:
        await asyncio.Event().wait()


async def test_a_repeated_error_is_logged_once_until_a_run_succeeds(caplog) -> None:
    fault = RuntimeError("odd")
    work = PlannedWork(*[fault] * 3, None, *[fault] * 3)
    async with periodic_tasks([Job(work=work.run, period_s=0.001)]):
        await asyncio.wait_for(work.done.wait(), 10)
    assert [record.getMessage() for record in caplog.records] == [
        "job.failed job=PlannedWork.run"
    ] * 2


async def test_errors_of_records_are_theirs_to_log_and_a_job_that_hangs_delays_no_other(
    caplog,
) -> None:
    work = PlannedWork(RecordsUnwritable())
    silent = Job(work=work.run, period_s=0.001)
    async with periodic_tasks([Job(work=work.hang, period_s=0.001), silent]):
        await asyncio.wait_for(work.done.wait(), 10)
    assert not caplog.records


@pytest.mark.parametrize("shared", [False, True], ids=["in a file", "over Redis"])
def test_a_gateway_has_one_job_for_each_shared_record(tmp_path, redis, shared) -> None:
    url = SecretStr(redis.url) if shared else None
    with RunningGateway(make_settings(tmp_path, redis_url=url)) as gateway:
        names = [
            task.get_name()
            for task in asyncio.all_tasks(gateway.loop)
            if task.get_name().startswith("job ")
        ]
    assert len(names) == len(set(names))
    assert {"job KeyStore.refresh", "job Cordons.refresh", "job PolicyStore.refresh"} <= {*names}


def test_a_gateway_gives_back_its_heap_every_ten_seconds(tmp_path, monkeypatch) -> None:
    trimmed = threading.Event()
    monkeypatch.setattr(assembly, "trim_heap", trimmed.set)
    monkeypatch.setattr(assembly, "TRIM_INTERVAL_S", 0.01)
    with RunningGateway(make_settings(tmp_path)):
        assert trimmed.wait(60)


KEEPER = """
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from paceline.lifecycle import trim_heap

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def work():
    for _ in range(2):
        [b"x" * 20_000_000 for _ in range(2)]

bytearray(b"x" * 32_000_000)
trim_heap()
with ThreadPoolExecutor(1) as thread:
    thread.submit(int).result()
    before = resident_bytes()
    thread.submit(work).result()
    trim_heap()
    print(resident_bytes() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc's heap")
def test_c16_what_a_thread_has_freed_of_large_bodies_goes_back_to_the_system() -> None:
    """In a process of its own: that of the tests has set its thresholds."""
    kept = subprocess.run([sys.executable, "-c", KEEPER], capture_output=True, check=True)
    assert int(kept.stdout) < 10_000_000, "42 MB with the thresholds that a large block has raised"
