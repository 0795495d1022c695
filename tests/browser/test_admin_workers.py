"""Workers on the page for admins: how busy they are, and who gets no new requests."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.support.browser_tab import Watched
from tests.support.heartbeats import beating
from tests.support.running_gateway import RunningGateway, eventually
from tests.support.scripted_worker import FakeWorker, Script

pytestmark = pytest.mark.asyncio(loop_scope="session")


def heard(line: RunningGateway, *workers: FakeWorker) -> list[int]:
    """Send six requests and count who got how many."""
    before = [len(worker.heard) for worker in workers]
    for _ in range(6):
        assert line.chat().status_code == 200
    return [len(worker.heard) - was for worker, was in zip(workers, before, strict=True)]


async def test_a_cordoned_worker_gets_nothing_until_that_is_lifted(
    line: RunningGateway, worker: FakeWorker, second_worker: FakeWorker, watched: Watched
) -> None:
    page = watched.page
    with beating(line, second_worker):
        await watched.visit(line.url, "#workers")
        card = page.get_by_role("article", name="fake-a")
        await expect(card).to_contain_text("ready")
        await expect(page.locator("#fleet-line")).to_contain_text("2 of 2 workers ready")
        await watched.button("Cordon fake-a").click()
        await expect(card).to_contain_text("cordoned")
        await expect(card).to_contain_text("by loopback. Nothing runs there: it can be stopped.")
        assert heard(line, worker, second_worker) == [0, 6]
        await watched.button("Uncordon fake-a").click()
        await expect(card).to_contain_text("ready")
        eventually(lambda: heard(line, worker, second_worker)[0] > 0)


async def test_draining_lets_answers_finish_and_says_when_the_worker_is_empty(
    line: RunningGateway, worker: FakeWorker, watched: Watched
) -> None:
    worker.script = Script(hang_after=1)
    page = watched.page
    await watched.visit(line.url, "#workers")
    card = page.get_by_role("article", name="fake-a")
    with line.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        await watched.button("Drain fake-a").click()
        await expect(card).to_contain_text("1 answer still runs.")
        worker.go_on.set()
        assert "data: [DONE]" in list(lines)
    await expect(page.locator("#notice")).to_have_text("fake-a is empty: it can be stopped.")
