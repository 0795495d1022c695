"""The page for admins: sign-in by key and by link, and what keeps the key in its tab."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.support.browser_tab import BrowserTab
from tests.support.running_gateway import RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

REFUSAL = "This is not the admin key of this gateway."


async def test_the_page_rejects_a_wrong_key_with_a_message_and_accepts_the_right_key(
    module_gateway: RunningGateway, tab: BrowserTab
) -> None:
    page, key = tab.page, module_gateway.admin_key
    sign_in = page.get_by_role("heading", name="Sign in")
    refusal, version = page.locator("#sign-in-refusal"), page.locator("#active-version")
    await tab.open(module_gateway.url, "/admin")
    for invalid_key in ("wrong", "schlüssel", "two words"):
        await page.get_by_label("Admin key").fill(invalid_key)
        await tab.button("Sign in").click()
        await expect(refusal).to_contain_text(REFUSAL)
        await expect(page.get_by_label("Admin key")).to_have_value("")
    await page.get_by_label("Admin key").fill(key)
    await page.keyboard.press("Enter")
    await expect(version).to_contain_text("Version 1 is active")
    await page.reload()
    await expect(version).to_contain_text("Version 1 is active")

    assert not [url for url in tab.requested_urls if key in url]
    storage = "[document.cookie, JSON.stringify({...localStorage}), location.href].join()"
    assert key not in await page.evaluate(storage)
    second_page = await page.context.new_page()
    await second_page.goto(f"{module_gateway.url}/admin")
    await expect(second_page.get_by_role("heading", name="Sign in")).to_be_visible()
    await second_page.close()

    await tab.button("Sign out").click()
    await expect(sign_in).to_be_visible()
    await page.reload()
    await expect(sign_in).to_be_visible()
    await page.evaluate("sessionStorage.setItem('paceline-admin-key', 'expired')")
    await page.reload()
    await expect(refusal).to_contain_text(REFUSAL)


async def test_c3_a_link_with_the_stored_key_signs_in_and_loses_the_key(
    module_gateway: RunningGateway, tab: BrowserTab
) -> None:
    page, url = tab.page, module_gateway.url
    version = page.locator("#active-version")
    for visit in ("a new page", "the open sign-in form"):
        await tab.open_admin(module_gateway)
        await expect(version).to_contain_text("Version 1 is active")
        assert page.url == f"{url}/admin", visit
        await page.reload()
        await expect(version).to_contain_text("Version 1 is active")
        await tab.button("Sign out").click()
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    await page.goto(f"{url}/admin#admin-key=wrong")
    await expect(page.locator("#sign-in-refusal")).to_contain_text(REFUSAL)
    assert page.url == f"{url}/admin"
