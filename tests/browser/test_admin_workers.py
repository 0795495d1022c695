"""Workers on the page for admins: how busy they are, and who gets no new requests."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.support.browser_tab import BrowserTab
from tests.support.heartbeats import send_heartbeats
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker

pytestmark = pytest.mark.asyncio(loop_scope="session")


def heard(line: RunningGateway, *workers: ScriptedWorker) -> list[int]:
    """Send six requests and count who got how many."""
    before = [len(worker.requests) for worker in workers]
    for _ in range(6):
        assert line.chat().status_code == 200
    return [len(worker.requests) - was for worker, was in zip(workers, before, strict=True)]


async def test_a_cordoned_worker_gets_nothing_until_that_is_lifted(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    tab: BrowserTab,
) -> None:
    page = tab.page
    with send_heartbeats(gateway_with_worker, second_worker):
        await tab.open_admin(gateway_with_worker.url, "#workers")
        card = page.get_by_role("article", name="fake-a")
        await expect(card).to_contain_text("ready")
        await expect(page.locator("#fleet-line")).to_contain_text("2 of 2 workers ready")
        await tab.button("Cordon fake-a").click()
        await expect(card).to_contain_text("cordoned")
        await expect(card).to_contain_text("by loopback. It runs no request and can be stopped.")
        assert heard(gateway_with_worker, worker, second_worker) == [0, 6]
        await tab.button("Uncordon fake-a").click()
        await expect(card).to_contain_text("ready")
        wait_until(lambda: heard(gateway_with_worker, worker, second_worker)[0] > 0)


async def test_draining_lets_answers_finish_and_says_when_the_worker_is_empty(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tab: BrowserTab
) -> None:
    worker.script = Script(hang_after=1)
    page = tab.page
    await tab.open_admin(gateway_with_worker.url, "#workers")
    card = page.get_by_role("article", name="fake-a")
    with gateway_with_worker.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        await tab.button("Drain fake-a").click()
        await expect(card).to_contain_text("1 request still runs.")
        worker.resume.set()
        assert "data: [DONE]" in list(lines)
    await expect(page.locator("#notice")).to_have_text("fake-a runs no request and can be stopped.")
