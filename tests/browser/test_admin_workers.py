"""Workers on the page for admins: load, cordon and drain."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.support.browser_tab import BrowserTab
from tests.support.heartbeats import send_heartbeats
from tests.support.running_gateway import RunningGateway, begun
from tests.support.scripted_worker import DONE, JOIN_TOKEN, Script, ScriptedWorker

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_cordoned_worker_receives_no_request_and_a_drained_one_finishes_its_answers(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    tab: BrowserTab,
) -> None:
    page = tab.page
    worker.script = second_worker.script = Script(hang_after=1)
    with send_heartbeats(gateway_with_worker, second_worker):
        await tab.open_admin(gateway_with_worker, "#workers")
        card = page.get_by_role("article", name="fake-a")
        await expect(page.locator("#fleet-line")).to_contain_text("2 of 2 workers ready")
        await tab.button("Cordon fake-a").click()
        await expect(card).to_contain_text("cordoned")
        await expect(card).to_contain_text("by admin. It runs no request and can be stopped.")
        second_worker.resume.set()
        assert [gateway_with_worker.chat().status_code for _ in range(6)] == [200] * 6
        assert not worker.requests
        await tab.button("Uncordon fake-a").click()
        await expect(card).to_contain_text("ready")
    gateway_with_worker.remove_worker(second_worker)
    with begun(gateway_with_worker.stream()) as read:
        await tab.button("Drain fake-a").click()
        await expect(card).to_contain_text("1 request still runs.")
        worker.resume.set()
        assert read().endswith(DONE)
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
