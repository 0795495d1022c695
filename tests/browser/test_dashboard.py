"""The page that shows what the fleet does: who sees it, on what screens, and how it begins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import expect
from pydantic import SecretStr

from gateway.status.events import VIEWERS_LIMIT
from policies.request.profile import Bypass
from tests.support.browser_tab import BrowserTab
from tests.support.heartbeats import send_heartbeats
from tests.support.page_files import PAGES
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import RunningGateway, make_settings
from tests.support.scripted_worker import Script, ScriptedWorker, lane_report

IN_THE_BROWSER = pytest.mark.asyncio(loop_scope="session")


@IN_THE_BROWSER
async def test_before_the_first_request_the_page_says_what_is_missing(
    gateway: RunningGateway, worker: ScriptedWorker, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_dashboard(gateway.url)
    await expect(page.locator("#live")).to_have_text("Live")
    await expect(page.locator("#trouble")).to_contain_text("No worker has joined")
    assert gateway.send_heartbeat(worker).status_code == 200
    await expect(page.locator("#trouble")).to_be_hidden()
    for fact in ("saved-mtp", "accepted", "saved-prompts", "now"):
        await expect(page.locator(f"#{fact}-line")).to_have_text("No request yet")
    await expect(page.locator("#reasons")).to_have_text("No request yet.")
    await expect(page.locator("#chart-acceptance .nothing")).to_be_visible()
    await expect(page.get_by_role("article", name="fake-a")).to_contain_text("0 of 4")


@IN_THE_BROWSER
async def test_a_request_is_a_mark_on_the_track_of_its_lane_for_as_long_as_it_runs(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tab: BrowserTab
) -> None:
    worker.script = Script(hang_after=1)
    track = tab.page.get_by_role("article", name="text-mtp")
    await tab.open_dashboard(gateway_with_worker.url)
    await expect(track).to_contain_text("0 of 4")
    with (
        gateway_with_worker.stream(temperature=0) as first,
        gateway_with_worker.stream(temperature=0) as second,
    ):
        await expect(track).to_contain_text("2 of 4")
        assert await track.locator(".mark").count() == 2
        await expect(tab.page.locator("#now")).to_have_text("2 running")
        worker.resume.set()
        for stream in (first, second):
            stream.read()
    await expect(track.locator(".mark")).to_have_count(0)
    await expect(track).to_contain_text("0 of 4")


@IN_THE_BROWSER
async def test_a_key_is_asked_for_and_stays_in_its_tab(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    key = gateway_with_worker.create_key()
    some = gateway_with_worker.create_key(models=["demo"])
    await tab.open_dashboard(gateway_with_worker.url)
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    refusal = page.locator("#sign-in-refusal")
    for secret, why in (
        ("wrong", "does not accept this key"),
        (some["secret"], "cannot read the status"),
    ):
        await page.get_by_label("Key").fill(secret)
        await page.keyboard.press("Enter")
        await expect(refusal).to_contain_text(why)
    await page.get_by_label("Key").fill(key["secret"])
    await tab.button("Sign in").click()
    await expect(page.locator("#live")).to_have_text("Live")
    assert not [url for url in tab.requested_urls if key["secret"] in url]
    kept = "[document.cookie, JSON.stringify({...localStorage}), location.href].join()"
    assert key["secret"] not in await page.evaluate(kept)

    gateway_with_worker.admin.delete(f"/admin/v1/keys/{key['id']}").raise_for_status()
    await expect(refusal).to_contain_text("does not accept this key, or no longer does")
    await expect(page.locator("#view-line")).to_be_hidden()


@IN_THE_BROWSER
async def test_the_page_fits_a_phone_and_follows_the_light_of_its_reader(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await page.set_viewport_size({"width": 375, "height": 720})
    assert gateway_with_worker.chat(temperature=0).status_code == 200
    assert gateway_with_worker.chat(temperature=1).status_code == 200
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        await tab.open_dashboard(gateway_with_worker.url)
        await expect(page.get_by_role("article", name="fake-a")).to_be_visible()
        await expect(page.locator("#chart-answer canvas")).to_be_visible()
        assert not await page.evaluate(wide), scheme
        seen.append(await page.evaluate(ground))
    assert seen == ["rgb(246, 246, 243)", "rgb(18, 20, 22)"]


@IN_THE_BROWSER
async def test_a_page_that_is_closed_leaves_its_place_to_the_next(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    await tab.open_dashboard(gateway_with_worker.url)
    await expect(tab.page.locator("#live")).to_have_text("Live")
    async with contextlib.AsyncExitStack() as viewers:
        for _ in range(VIEWERS_LIMIT - 1):
            assert await viewers.enter_async_context(viewer(gateway_with_worker)) == 200
        async with viewer(gateway_with_worker) as status:
            assert status == 503
        await tab.page.close()
        async with asyncio.timeout(20):
            while True:
                async with viewer(gateway_with_worker) as status:
                    if status == 200:
                        return


@contextlib.asynccontextmanager
async def viewer(line: RunningGateway) -> AsyncIterator[int]:
    """Watch as one who only looks at the status of the answer."""
    place = urlsplit(line.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(b"GET /v1/status/events HTTP/1.1\r\nhost: %b\r\n\r\n" % place.netloc.encode())
    try:
        yield int((await reader.readline()).split()[1])
    finally:
        writer.close()


@IN_THE_BROWSER
async def test_a_gateway_that_ends_is_told_of_and_looked_for_again(
    gateway: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_dashboard(gateway.url)
    await expect(page.locator("#live")).to_have_text("Live")
    gateway.request_shutdown()
    await expect(page.locator("#live")).to_have_text("Not connected")
    await expect(page.locator("#view-line")).to_be_visible()
    asked = len(tab.requested_urls)
    async with asyncio.timeout(20):
        while len(tab.requested_urls) < asked + 2:
            await asyncio.sleep(0.1)
    await page.goto("about:blank")  # it asks no more
    refused = "Failed to load resource: net::ERR_CONNECTION_REFUSED"
    tab.errors[:] = [fault for fault in tab.errors if fault != refused]


@IN_THE_BROWSER
async def test_of_several_gateways_the_page_says_whose_its_curves_are(
    redis: RedisServer, tmp_path: Path, gateway: RunningGateway, tab: BrowserTab
) -> None:
    shown = tab.page.locator("#whose")
    await tab.open_dashboard(gateway.url)
    await expect(tab.page.locator("#live")).to_have_text("Live")
    await expect(shown).to_be_hidden()
    with contextlib.ExitStack() as both:
        one, _ = (
            both.enter_context(
                RunningGateway(make_settings(tmp_path / name, redis_url=SecretStr(redis.url)))
            )
            for name in ("one", "other")
        )
        await tab.open_dashboard(one.url)
        await expect(shown).to_contain_text("this gateway sent, one of 2")
        await tab.page.goto("about:blank")


@IN_THE_BROWSER
async def test_a_reason_counts_only_requests_that_were_really_not_drafted_for(
    gateway: RunningGateway, worker: ScriptedWorker, tab: BrowserTab
) -> None:
    """A picture is kept out of the speculative lane; the other one may draft for it."""
    reasons = tab.page.locator("#reasons")
    worker.lanes = ("vlm",)
    with send_heartbeats(gateway, worker):
        assert gateway.chat(temperature=0.5).status_code == 200
        await tab.open_dashboard(gateway.url)
        await expect(reasons).to_contain_text("non greedy sampling")
        drafting = lane_report("vlm", mtp_enabled=True, bypass_counts={"logprobs": 2})
        worker.status_report = worker.report(lanes=[drafting.model_dump()])
        await expect(reasons).to_contain_text("logprobs")
        await expect(reasons).not_to_contain_text("non greedy sampling")


def test_each_reason_has_its_sentence() -> None:
    text = (PAGES / "dashboard" / "reasons.js").read_text()
    for reason in Bypass:
        assert f'\n  {reason.value}: "' in text, reason
