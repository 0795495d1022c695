"""Workers on the page for admins: load, cordon and drain."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.support.browser_tab import BrowserTab
from tests.support.heartbeats import send_heartbeats
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_worker import JOIN_TOKEN, Script, ScriptedWorker

pytestmark = pytest.mark.asyncio(loop_scope="session")


def send_six_requests(gateway: RunningGateway, *workers: ScriptedWorker) -> list[int]:
    """Send six requests; return how many of them each worker received."""
    before = [len(worker.requests) for worker in workers]
    for _ in range(6):
        assert gateway.chat().status_code == 200
    return [len(worker.requests) - count for worker, count in zip(workers, before, strict=True)]


async def test_a_cordoned_worker_receives_no_request_until_it_is_uncordoned(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    tab: BrowserTab,
) -> None:
    page = tab.page
    with send_heartbeats(gateway_with_worker, second_worker):
        await tab.open_admin(gateway_with_worker, "#workers")
        card = page.get_by_role("article", name="fake-a")
        await expect(card).to_contain_text("ready")
        await expect(page.locator("#fleet-line")).to_contain_text("2 of 2 workers ready")
        await tab.button("Cordon fake-a").click()
        await expect(card).to_contain_text("cordoned")
        await expect(card).to_contain_text("by admin. It runs no request and can be stopped.")
        assert send_six_requests(gateway_with_worker, worker, second_worker) == [0, 6]
        await tab.button("Uncordon fake-a").click()
        await expect(card).to_contain_text("ready")
        wait_until(lambda: send_six_requests(gateway_with_worker, worker, second_worker)[0] > 0)


async def test_a_drained_worker_finishes_its_answers_and_the_page_shows_when_it_is_idle(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tab: BrowserTab
) -> None:
    worker.script = Script(hang_after=1)
    page = tab.page
    await tab.open_admin(gateway_with_worker, "#workers")
    card = page.get_by_role("article", name="fake-a")
    with gateway_with_worker.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        await tab.button("Drain fake-a").click()
        await expect(card).to_contain_text("1 request still runs.")
        worker.resume.set()
        assert "data: [DONE]" in list(lines)
    await expect(page.locator("#notice")).to_have_text("fake-a runs no request and can be stopped.")


async def test_a_new_mac_appears_while_one_looks_and_the_page_shows_no_token(
    gateway_with_worker: RunningGateway, second_worker: ScriptedWorker, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_worker, "#workers")
    await expect(page.get_by_role("article", name="fake-a")).to_contain_text("ready")
    await tab.button("Add a Mac").click()
    dialog = page.get_by_role("dialog", name="Add a Mac")
    await expect(dialog).to_contain_text("paceline worker --join ")
    await expect(dialog).to_contain_text("Waiting for a new worker")
    assert JOIN_TOKEN not in await page.content()
    async with page.expect_response("**/admin/v1/workers"):
        pass
    assert gateway_with_worker.send_heartbeat(second_worker, url="http://127.0.0.1:1").is_error
    await expect(dialog).to_contain_text("fake-b: The worker's address refuses")
    with send_heartbeats(gateway_with_worker, second_worker):
        await expect(dialog).to_contain_text("fake-b: ready")
