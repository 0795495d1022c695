"""Keys on the page for admins: creation, display of the secret, limits and revocation."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.support.browser_tab import BrowserTab
from tests.support.running_gateway import RunningGateway, status_and_code

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_key_is_shown_once_allows_its_pools_and_is_revoked_and_wrong_terms_are_explained(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page, gateway = tab.page, gateway_with_worker
    assert gateway.chat().status_code == 200
    await tab.open_admin(gateway, "#keys")
    await expect(page.locator("#keys")).to_contain_text("There is no key yet")
    await expect(page.locator("#usage tbody tr")).to_contain_text("Without a key1")
    await tab.button("New key").click()
    form = page.get_by_role("dialog")
    await form.get_by_label("Name").fill("Ann")
    await form.get_by_label("Team").fill("lab")
    await form.get_by_label("Requests a minute").fill("2")
    await form.get_by_label("vlm").check()
    await tab.button("Create key").click()
    assert gateway.admin.get("/admin/v1/keys").json()["keys"] == []
    await form.get_by_label("All clients need a key from now on").check()
    await form.get_by_label("Models").fill("gpt-4o-mini")
    await tab.button("Create key").click()
    await expect(form.get_by_role("alert")).to_contain_text("is an alias; use 'demo'")
    await expect(form.get_by_label("Name")).to_have_value("Ann")
    await form.get_by_label("Models").fill("demo")
    await tab.button("Create key").click()
    secret = await page.get_by_label("The key", exact=True).input_value()
    assert secret.startswith("pk-")
    snippet = page.get_by_role("region", name="Code for curl")
    await expect(snippet).to_contain_text(f"Authorization: Bearer {secret}")
    await expect(snippet).to_contain_text(f"{gateway.url}/v1/chat/completions")
    await tab.button("Close").click()
    row = page.locator("#keys tbody tr")
    await expect(row).to_contain_text("2 requests/min")
    await expect(row).to_contain_text("pool vlm")
    assert secret not in await page.content()

    assert status_and_code(gateway.chat()) == (401, "invalid_api_key")
    gateway.use_key(secret)
    assert gateway.chat(temperature=0).headers["x-paceline-pool"] == "vlm"

    await tab.button("Edit the key Ann").click()
    await form.get_by_label("Requests a minute").fill("")
    await tab.button("Save").click()
    await expect(row).not_to_contain_text("requests/min")
    assert [gateway.chat().status_code for _ in range(3)] == [200] * 3

    await page.reload()
    await expect(page.locator("#usage tbody tr").first).to_contain_text("Ann4")
    await expect(page.locator("#usage .legend")).to_have_text("AnnWithout a key")
    await expect(page.locator("#usage .day span")).to_have_count(2)
    async with page.expect_download() as download:
        await tab.button("Download CSV").click()
    assert "Ann,lab,4," in (await (await download.value).path()).read_text()

    await tab.button("Revoke the key Ann").click()
    await tab.button("Revoke key").click()
    await expect(row).to_contain_text("revoked")
    assert gateway.chat().status_code == 401
