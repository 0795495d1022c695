"""The page for admins as a page: who gets in, what it may load, and on what screens it fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect
from pydantic import SecretStr

from tests.support.browser_tab import BrowserTab
from tests.support.heartbeats import send_heartbeats
from tests.support.page_files import FOLDERS, page_files
from tests.support.running_gateway import RunningGateway, make_settings
from tests.support.scripted_worker import ScriptedWorker

IN_THE_BROWSER = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def gateway_with_keys(tmp_path: Path, worker: ScriptedWorker) -> Iterator[RunningGateway]:
    settings = make_settings(tmp_path, admin_key=SecretStr("admin-key"))
    with RunningGateway(settings) as running, send_heartbeats(running, worker):
        yield running


@IN_THE_BROWSER
async def test_a_wrong_key_is_one_clear_sentence_and_the_right_one_opens(
    gateway_with_keys: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_keys.url)
    refusal = page.locator("#sign-in-refusal")
    for wrong in ("wrong", "schlüssel", "two words"):
        await page.get_by_label("Admin key").fill(wrong)
        await tab.button("Sign in").click()
        await expect(refusal).to_contain_text("This is not the admin key of this gateway.")
        await expect(page.get_by_label("Admin key")).to_have_value("")
    await page.get_by_label("Admin key").fill("admin-key")
    await page.keyboard.press("Enter")
    await expect(page.locator("#active-version")).to_contain_text("Version 1 is active")
    await page.reload()
    await expect(page.locator("#active-version")).to_contain_text("Version 1 is active")

    assert not [url for url in tab.requested_urls if "admin-key" in url]
    kept = "[document.cookie, JSON.stringify({...localStorage}), location.href].join()"
    assert "admin-key" not in await page.evaluate(kept)
    other = await tab.context.new_page()
    await other.goto(f"{gateway_with_keys.url}/admin")
    await expect(other.get_by_role("heading", name="Sign in")).to_be_visible()

    await tab.button("Sign out").click()
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    await page.reload()
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


@IN_THE_BROWSER
async def test_a_key_that_counts_no_more_leads_back_to_the_door(
    gateway_with_keys: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_keys.url)
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    await page.evaluate("sessionStorage.setItem('paceline-admin-key', 'of-yesterday')")
    await page.reload()
    await expect(page.locator("#sign-in-refusal")).to_contain_text("This is not the admin key")


@IN_THE_BROWSER
async def test_where_this_machine_alone_is_trusted_others_are_told_so(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    await tab.context.set_extra_http_headers({"x-forwarded-for": "192.168.1.7"})
    await tab.open_admin(gateway_with_worker.url)
    refusal = tab.page.locator("#sign-in-refusal")
    await expect(refusal).to_contain_text("only the gateway's own machine may use")


@IN_THE_BROWSER
async def test_no_section_is_wider_than_a_phone(
    gateway_with_worker: RunningGateway, browser: Browser, tab: BrowserTab
) -> None:
    page = tab.page
    gateway_with_worker.create_key(
        name="A key with quite a long name for a phone", team="research and development"
    )
    await page.set_viewport_size({"width": 375, "height": 720})
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    for section, ready in (
        ("#policy", "#history li"),
        ("#keys", "#keys tbody tr"),
        ("#workers", "article"),
    ):
        await tab.open_admin(gateway_with_worker.url, section)
        await page.reload()
        await expect(page.locator(ready).first).to_be_visible()
        assert not await page.evaluate(wide), section
    await tab.open_admin(gateway_with_worker.url, "#keys")
    await tab.button("New key").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_be_visible()
    assert not await page.evaluate(wide)
    assert not await dialog.evaluate("dialog => dialog.scrollWidth > dialog.clientWidth")


@IN_THE_BROWSER
async def test_it_can_be_used_with_a_keyboard_alone(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_worker.url)
    await expect(page.locator("#active-version")).to_contain_text("is active")
    focused = "document.activeElement.textContent.trim() || document.activeElement.id"
    reached = []
    for _ in range(6):
        await page.keyboard.press("Tab")
        reached.append(await page.evaluate(focused))
    assert reached == [
        *("Skip to the content", "Policy", "Keys", "Workers", "policy-text"),
        "apply-author",
    ]


@IN_THE_BROWSER
async def test_what_others_wrote_is_text_and_never_part_of_the_page(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    """An admin's note, and a worker's own words, cannot act for another admin."""
    evil = "<img src=x onerror=document.title='owned'>"
    etag = gateway_with_worker.admin.get("/admin/v1/policy").headers["etag"]
    headers = {"if-match": etag, "x-paceline-note": evil, "x-paceline-author": evil}
    patch = {"pools": {"text-mtp": {"queue": {"limit": 7}}}}
    assert (
        gateway_with_worker.admin.patch("/admin/v1/policy", json=patch, headers=headers).status_code
        == 200
    )
    await tab.open_admin(gateway_with_worker.url)
    await expect(tab.page.locator("#history li").first).to_contain_text(evil)
    assert await tab.page.locator("main img").count() == 0
    assert "owned" not in await tab.page.title()


@pytest.mark.parametrize("page", FOLDERS)
def test_every_file_of_a_page_comes_with_the_rules_that_bind_it(
    gateway_with_worker: RunningGateway, page: str
) -> None:
    paths = [f"/{page}", *(f"/{page}/page/{file.name}" for file in page_files(page))]
    paths.remove(f"/{page}/page/index.html")
    assert len(paths) > 5
    for path in paths:
        answer = gateway_with_worker.client.get(path)
        assert answer.status_code == 200
        rules = answer.headers["content-security-policy"].split("; ")
        assert {
            *("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"),
            *("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"),
        } <= {*rules}
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        kept = gateway_with_worker.client.get(
            path, headers={"if-none-match": answer.headers["etag"]}
        )
        assert (kept.status_code, kept.content) == (304, b"")


def test_pages_name_no_other_place_and_hold_nothing_inline() -> None:
    for file in page_files("admin") + page_files("dashboard"):
        if file.parent.name == "uplot":
            continue  # as its makers wrote it; what it does is seen in the browser
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, file
        assert "innerHTML" not in text, file
        if file.suffix == ".html":
            assert "style=" not in text
            assert "<style" not in text
            assert text.count("<script") == len(
                re.findall(r'<script (type="module" )?src="/', text)
            )
