"""The page for admins: sign-in, content security, accessibility and small screens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect
from pydantic import SecretStr

from tests.support.browser_tab import BrowserTab
from tests.support.heartbeats import send_heartbeats
from tests.support.page_files import FOLDERS, page_files, page_path
from tests.support.running_gateway import RunningGateway, make_settings
from tests.support.scripted_worker import ScriptedWorker

IN_BROWSER = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def gateway_with_keys(tmp_path: Path, worker: ScriptedWorker) -> Iterator[RunningGateway]:
    settings = make_settings(tmp_path, admin_key=SecretStr("admin-key"))
    with RunningGateway(settings) as running, send_heartbeats(running, worker):
        yield running


@IN_BROWSER
async def test_the_page_rejects_a_wrong_key_with_a_message_and_accepts_the_right_key(
    gateway_with_keys: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_sign_in(gateway_with_keys)
    refusal = page.locator("#sign-in-refusal")
    for invalid_key in ("wrong", "schlüssel", "two words"):
        await page.get_by_label("Admin key").fill(invalid_key)
        await tab.button("Sign in").click()
        await expect(refusal).to_contain_text("This is not the admin key of this gateway.")
        await expect(page.get_by_label("Admin key")).to_have_value("")
    await page.get_by_label("Admin key").fill("admin-key")
    await page.keyboard.press("Enter")
    await expect(page.locator("#active-version")).to_contain_text("Version 1 is active")
    await page.reload()
    await expect(page.locator("#active-version")).to_contain_text("Version 1 is active")

    assert not [url for url in tab.requested_urls if "admin-key" in url]
    storage = "[document.cookie, JSON.stringify({...localStorage}), location.href].join()"
    assert "admin-key" not in await page.evaluate(storage)
    second_page = await tab.context.new_page()
    await second_page.goto(f"{gateway_with_keys.url}/admin")
    await expect(second_page.get_by_role("heading", name="Sign in")).to_be_visible()

    await tab.button("Sign out").click()
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    await page.reload()
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


@IN_BROWSER
async def test_an_invalid_stored_key_leads_back_to_the_sign_in_form(
    gateway_with_keys: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_sign_in(gateway_with_keys)
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    await page.evaluate("sessionStorage.setItem('paceline-admin-key', 'expired')")
    await page.reload()
    await expect(page.locator("#sign-in-refusal")).to_contain_text("This is not the admin key")


@IN_BROWSER
async def test_c3_a_link_with_the_stored_key_signs_in_and_loses_the_key(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page, url = tab.page, gateway_with_worker.url
    for visit in ("a new page", "the open sign-in form"):
        await tab.open_sign_in(gateway_with_worker)
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        if visit == "a new page":
            await page.goto("about:blank")
        await tab.open_admin(gateway_with_worker)
        await expect(page.locator("#active-version")).to_contain_text("Version 1 is active")
        assert page.url == f"{url}/admin", visit
        await page.reload()
        await expect(page.locator("#active-version")).to_contain_text("Version 1 is active")
        await tab.button("Sign out").click()
    await tab.open_admin(gateway_with_worker)
    await page.goto(f"{url}/admin#admin-key=wrong")
    await expect(page.locator("#sign-in-refusal")).to_contain_text("This is not the admin key")
    assert page.url == f"{url}/admin"


@IN_BROWSER
async def test_no_section_is_wider_than_a_phone(
    gateway_with_worker: RunningGateway, browser: Browser, tab: BrowserTab
) -> None:
    page = tab.page
    gateway_with_worker.create_key(
        name="A key with quite a long name for a phone", team="research and development"
    )
    await page.set_viewport_size({"width": 375, "height": 720})
    is_too_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    for section, selector in (
        ("#policy", "#history li"),
        ("#keys", "#keys tbody tr"),
        ("#workers", "article"),
    ):
        await page.goto("about:blank")  # so that the section is loaded anew
        await tab.open_admin(gateway_with_worker, section)
        await expect(page.locator(selector).first).to_be_visible()
        assert not await page.evaluate(is_too_wide), section
    await tab.open_admin(gateway_with_worker, "#keys")
    await tab.button("New key").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_be_visible()
    assert not await page.evaluate(is_too_wide)
    assert not await dialog.evaluate("dialog => dialog.scrollWidth > dialog.clientWidth")


@IN_BROWSER
async def test_the_page_works_with_the_keyboard(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_worker)
    await expect(page.locator("#active-version")).to_contain_text("is active")
    focused = "document.activeElement.id || document.activeElement.textContent.trim()"
    links = await page.locator("#navigation a").all_inner_texts()
    assert {"Live", "Workers", "Keys", "Policy"} <= {*links}
    expected = [
        *("Skip to the content", f"Paceline {version('paceline')}", *links),
        *("sign-out", "examples", "policy-text"),
    ]
    focused_elements = []
    for _ in expected:
        await page.keyboard.press("Tab")
        focused_elements.append(await page.evaluate(focused))
    assert focused_elements == expected


@IN_BROWSER
async def test_text_of_other_admins_is_escaped(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    """A note or the name of an author cannot run a script in the browser of another admin."""
    script = "<img src=x onerror=document.title='owned'>"
    etag = gateway_with_worker.admin.get("/admin/v1/policy").headers["etag"]
    headers = {"if-match": etag, "x-paceline-note": script, "x-paceline-author": script}
    patch = {"pools": {"text-mtp": {"queue": {"limit": 7}}}}
    assert (
        gateway_with_worker.admin.patch("/admin/v1/policy", json=patch, headers=headers).status_code
        == 200
    )
    await tab.open_admin(gateway_with_worker)
    await expect(tab.page.locator("#history li").first).to_contain_text(script)
    assert await tab.page.locator("main img").count() == 0
    assert "owned" not in await tab.page.title()


@pytest.mark.parametrize("page", FOLDERS)
def test_every_file_of_a_page_has_security_headers_and_an_etag(
    gateway_with_worker: RunningGateway, page: str
) -> None:
    # The script of the API reference is another party's: a sandbox keeps it from keys and network.
    own = "sandbox allow-scripts" if page == "docs" else "connect-src 'self'"
    paths = [page_path(page), *(f"/{page}/page/{file.name}" for file in page_files(page))]
    paths.remove(f"/{page}/page/index.html")
    assert len(paths) > 5
    gateway_with_worker.client.headers["accept"] = "text/html,*/*;q=0.8"
    for path in paths:
        response = gateway_with_worker.client.get(path)
        assert response.status_code == 200
        directives = response.headers["content-security-policy"].split("; ")
        assert {
            *("default-src 'none'", "script-src 'self'", "style-src 'self'", own),
            *("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"),
        } <= {*directives}
        assert sum(one.startswith("connect-src") for one in directives) == (page != "docs")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        if path == "/docs":
            continue  # it contains the description of the routes
        cached = gateway_with_worker.client.get(
            path, headers={"if-none-match": response.headers["etag"]}
        )
        assert (cached.status_code, cached.content) == (304, b"")


def test_pages_contain_no_other_origin_and_no_inline_code() -> None:
    for file in {file for page in FOLDERS for file in page_files(page)}:
        if file.parent.name == "uplot":
            continue  # a third-party library, which the tests in the browser cover
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, file
        assert "innerHTML" not in text, file
        if file.suffix == ".html":
            assert "style=" not in text
            assert "<style" not in text
            assert text.count("<script") == len(
                re.findall(
                    r'<script ((type="module" )?src="/|id="openapi" type="application/json")', text
                )
            )
