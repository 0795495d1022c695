"""Gateways and workers on a Mac that would sleep, with a scripted `caffeinate`."""

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from paceline import wakefulness
from paceline.lifecycle import Shutdown
from tests.support.running_gateway import begun, wait_until
from tests.support.scripted_engine import ScriptedEngine, make_worker, text_events
from workers.server.server import serve

CAFFEINATE = """#!/bin/sh
echo "$*" >>"$CALLS"
trap 'kill $!; echo ended >>"$CALLS"; exit' TERM
tail -f /dev/null &
wait
"""
BEGUN = f"-i -w {os.getpid()}"


class Calls:
    """The calls of `caffeinate` so far, and their ends."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def wait_for(self, *lines: str) -> None:
        wait_until(lambda: self.lines == [*lines])

    @property
    def lines(self) -> list[str]:
        return self._file.read_text().splitlines() if self._file.exists() else []


@pytest.fixture
def caffeinate(tmp_path, monkeypatch):
    script = tmp_path / "bin/caffeinate"
    script.parent.mkdir()
    script.write_text(CAFFEINATE)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(wakefulness, "platform", SimpleNamespace(system=lambda: "Darwin"))
    monkeypatch.setattr(wakefulness, "CHECK_S", 0.01)
    monkeypatch.setattr(wakefulness, "LINGER_S", 0.01)
    return Calls(tmp_path / "calls")


def hang(gateway, worker):
    worker.resume.clear()
    worker.script.hang_after = 3
    return begun(gateway.stream())


def test_one_caffeinate_runs_in_each_busy_period_of_a_gateway(
    caffeinate, gateway_with_worker, worker
) -> None:
    assert caffeinate.lines == [], "an idle Mac may sleep"
    for period in range(2):
        before = [BEGUN, "ended"] * period
        with hang(gateway_with_worker, worker) as read:
            caffeinate.wait_for(*before, BEGUN)
            worker.resume.set()
            read()
        caffeinate.wait_for(*before, BEGUN, "ended")


def test_a_mac_stays_awake_between_the_steps_of_an_agent_until_the_gateway_ends(
    caffeinate, gateway_with_worker, worker, monkeypatch
) -> None:
    monkeypatch.setattr(wakefulness, "LINGER_S", 3600.0)
    for _ in range(2):
        with hang(gateway_with_worker, worker) as read:
            caffeinate.wait_for(BEGUN)
            worker.resume.set()
            read()
    gateway_with_worker.shut_down()
    assert caffeinate.lines == [BEGUN, "ended"]


async def test_a_worker_keeps_its_mac_awake_while_it_generates(caffeinate) -> None:
    gate, ready, shutdown = asyncio.Event(), asyncio.Event(), Shutdown()
    worker = make_worker(ScriptedEngine([gate, *text_events("A")]))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
        serving = asyncio.create_task(
            serve(worker, listener, token=None, shutdown=shutdown, on_ready=ready.set)
        )
        await ready.wait()
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
        async with httpx.AsyncClient(timeout=60) as client:
            asked = asyncio.create_task(client.post(url, json=body))
            await asyncio.to_thread(caffeinate.wait_for, BEGUN)
            gate.set()
            assert (await asked).status_code == 200
        await asyncio.to_thread(caffeinate.wait_for, BEGUN, "ended")
        shutdown.request()
        assert await serving


def test_a_mac_without_caffeinate_serves_and_says_so_once(
    caffeinate, gateway_with_worker, worker, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("PATH", "")
    with hang(gateway_with_worker, worker) as read:
        wait_until(lambda: "sleep.allowed" in caplog.text)
        worker.resume.set()
        read()
    worker.script.hang_after = None
    assert gateway_with_worker.chat().status_code == 200
    assert caplog.text.count("sleep.allowed") == 1
    assert caffeinate.lines == []
