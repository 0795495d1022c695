"""The dashboard: sign-in, screens, connection and its state before the first request."""

import asyncio
from collections.abc import Iterator

import pytest
from playwright.async_api import expect

from gateway.status import events
from tests.support.browser_tab import BrowserTab
from tests.support.gateway_fixtures import MakeClusterGateway
from tests.support.heartbeats import send_heartbeats
from tests.support.running_gateway import RunningGateway, bearer_headers, begun
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, lane_report

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module", autouse=True)
def frequent_events() -> Iterator[None]:
    """Send the status to live pages five times a second, so that they show each change soon."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(events, "PERIOD_S", 0.2)
        yield


async def test_the_page_shows_what_is_missing_and_each_running_request_as_a_mark(
    gateway: RunningGateway, worker: ScriptedWorker, tab: BrowserTab
) -> None:
    page = tab.page
    await page.emulate_media(reduced_motion="no-preference")  # the marks ride
    await tab.open(gateway.url, "/dashboard")
    await expect(page.locator("#live")).to_have_text("No Mac ready")
    await expect(page.locator("#trouble")).to_contain_text("No worker has joined")
    with send_heartbeats(gateway, worker):
        await expect(page.locator("#trouble")).to_be_hidden()
        await expect(page.locator("#macs")).to_have_text("1 of 1")
        await expect(page.locator("#macs-line")).to_have_text("demo")
        for figure in ("saved-mtp", "accepted", "saved-prompts", "requests", "errors"):
            await expect(page.locator(f"#{figure}-line")).to_have_text("No request yet")
        await expect(page.locator("#reasons")).to_have_text("No request yet.")
        await expect(page.locator("#chart-acceptance .nothing")).to_be_visible()
        await expect(page.get_by_role("article", name="fake-a")).to_contain_text("0 of 4")
        await expect(page.get_by_role("article", name="fake-a")).to_contain_text("no drafts yet")
        for figure in ("saved-mtp", "accepted", "saved-prompts"):
            await expect(page.locator(f"#{figure}")).to_have_text("\N{EN DASH}")
        track = page.get_by_role("article", name="text-mtp")
        await expect(track).to_contain_text("0 of 4")
        worker.script = Script(hang_after=1)
        with (
            begun(gateway.stream(temperature=0)) as first,
            begun(gateway.stream(temperature=0)) as second,
        ):
            await expect(track).to_contain_text("2 of 4")
            assert await track.locator(".mark").count() == 2
            await expect(page.locator("#requests-line")).to_contain_text("2 running")
            worker.resume.set()
            assert first().endswith(DONE)
            assert second().endswith(DONE)
        await expect(track.locator(".mark")).to_have_count(0)
        await expect(track).to_contain_text("0 of 4")


async def test_a_crash_is_told_as_one_and_failed_requests_are_listed(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker, tab: BrowserTab
) -> None:
    page = tab.page
    with send_heartbeats(gateway, worker):
        with gateway.stream(temperature=0) as stream:
            stream.read()
        worker.script = Script(status=500)
        failed = gateway.chat()
        assert failed.status_code == 502
        await tab.open(gateway.url, "/dashboard")
        await expect(page.locator("#live")).to_have_text("Live")
        await expect(page.locator("#errors-hour")).to_have_text("1")
        await expect(page.locator("#errors-line")).to_contain_text("of 2 requests")
        speed = page.get_by_role("article", name="text-mtp").get_by_text("tokens/s")
        await expect(speed).to_be_visible()
        entry = page.locator("#errors tbody tr")
        for text in ("502 worker_failed", "fake-a", failed.headers["x-request-id"]):
            await expect(entry).to_contain_text(text)
        copy = entry.get_by_role("button")
        await copy.click()
        await expect(page.locator("#notice")).to_have_text("Copied.")
        await expect(copy).to_have_text("Copy")
        await expect(page.locator("#errors-of")).to_have_text("of all clients")
        await expect(page.locator("#usage tbody tr")).to_contain_text("without a key02 / 2")
    with send_heartbeats(gateway, second_worker):
        gateway.remove_worker(worker, restarting=True)
        await expect(page.locator("#trouble")).to_contain_text("is being restarted")
        await expect(page.locator("#trouble")).not_to_contain_text("No worker has joined")
        await expect(page.locator("#live")).to_have_text("1 Mac missing")
    gateway.remove_worker(second_worker, restarting=True)
    await expect(page.locator("#live")).to_have_text("No Mac ready")
    await expect(speed).to_be_hidden()


async def test_the_page_asks_for_a_key_and_stores_it_only_in_its_tab(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    key = gateway_with_worker.create_key()
    limited_key = gateway_with_worker.create_key(models=["demo"])
    await tab.open(gateway_with_worker.url, "/dashboard")
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    refusal = page.locator("#sign-in-refusal")
    for secret, message in (
        ("wrong", "does not accept this key"),
        (limited_key["secret"], "cannot read the status"),
    ):
        await page.get_by_label("Key").fill(secret)
        await page.keyboard.press("Enter")
        await expect(refusal).to_contain_text(message)
    await page.get_by_label("Key").fill(key["secret"])
    await tab.button("Sign in").click()
    await expect(page.locator("#live")).to_have_text("Live")
    await expect(page.locator("#errors")).to_contain_text(
        "No recent request of your key has failed"
    )
    assert not [url for url in tab.requested_urls if key["secret"] in url]
    storage = "[document.cookie, JSON.stringify({...localStorage}), location.href].join()"
    assert key["secret"] not in await page.evaluate(storage)

    gateway_with_worker.revoke_key(key)
    await expect(refusal).to_contain_text("does not accept this key (any more)")
    await expect(page.locator("#view-line")).to_be_hidden()
    gateway_with_worker.chat(headers=bearer_headers(key))
    await tab.open_admin(gateway_with_worker)
    await tab.open(gateway_with_worker.url, "/dashboard")
    await expect(page.locator("#live")).to_have_text("Live")
    await expect(page.locator("#errors-of")).to_have_text("of all clients")
    await expect(page.locator("#errors tbody tr")).to_contain_text("127.0.0.1")
    await expect(page.locator("#usage tbody tr")).to_contain_text(key["name"])


async def test_the_page_names_one_of_several_gateways_and_reconnects_after_its_stop(
    make_cluster_gateway: MakeClusterGateway, gateway: RunningGateway, tab: BrowserTab
) -> None:
    page, source = tab.page, tab.page.locator("#whose")
    await tab.open(gateway.url, "/dashboard")
    await expect(page.locator("#live")).to_have_text("No Mac ready")
    await expect(source).to_be_hidden()
    first, _ = make_cluster_gateway(), make_cluster_gateway()
    await tab.open(first.url, "/dashboard")
    await expect(source).to_contain_text("this gateway sent, one of 2")
    first.request_shutdown()
    await expect(page.locator("#live")).to_have_text("Not connected")
    await expect(page.locator("#trouble")).to_contain_text("shows the last state until then")
    await expect(page.locator("#view-line")).to_be_visible()
    requests = len(tab.requested_urls)
    async with asyncio.timeout(60):
        while len(tab.requested_urls) < requests + 2:
            await asyncio.sleep(0.1)
    await page.goto("about:blank")  # it sends no more requests
    refused = "Failed to load resource: net::ERR_CONNECTION_REFUSED"
    tab.errors[:] = [error for error in tab.errors if error != refused]


async def test_a_bypass_reason_counts_only_requests_without_drafts(gateway, worker, tab) -> None:
    """The other lane may draft for a request that the speculative lane rejects."""
    reasons = tab.page.locator("#reasons")
    worker.lanes = ("vlm",)
    with send_heartbeats(gateway, worker):
        assert gateway.chat(temperature=0.5).status_code == 200
        await tab.open(gateway.url, "/dashboard")
        await expect(reasons).to_contain_text("Temperature above 0")
        drafting = lane_report("vlm", mtp_enabled=True, bypass_counts={"logprobs": 2})
        gateway.join_with(worker, drafting)
        await expect(reasons).to_contain_text("Log probabilities")
        await expect(reasons).not_to_contain_text("Temperature above 0")
