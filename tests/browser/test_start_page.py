"""The start page and the API reference, and what scripts of other pages and sites can do."""

import pytest
from playwright.async_api import expect

from paceline.protocol import StartProgress, StartStage
from tests.support.accessibility import accessibility_problems
from tests.support.browser_tab import BrowserTab
from tests.support.running_gateway import RunningGateway, wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

POST = """async ([url, body]) => {
  const sent = { method: "POST", mode: "no-cors", headers: { "content-type": "text/plain" }, body };
  return (await fetch(url, sent)).type;
}"""
IS_TOO_WIDE = "element => element.scrollWidth > element.clientWidth"
BODY = '{"model": "demo", "messages": [{"role": "user", "content": "x"}]}'


async def test_the_page_fills_the_address_the_model_and_the_key_into_each_snippet(
    gateway_with_worker, worker, tab
) -> None:
    page, url = tab.page, gateway_with_worker.url
    worker.status_report = worker.report(context_tokens=65536)
    assert gateway_with_worker.send_heartbeat(worker, context_tokens=65536).is_success
    wait_until(lambda: gateway_with_worker.status()["workers"]["fake-a"]["context_tokens"] == 65536)
    await tab.open(url, "/")
    await expect(page.locator("#live")).to_have_text("1 Mac ready")
    await expect(page.get_by_role("article", name="demo")).to_contain_text("Also called default")
    await expect(page.get_by_role("article", name="fake-a")).to_contain_text("ready")
    await expect(page.locator("#key-state")).to_contain_text("Not required")
    code = page.get_by_role("tabpanel").locator("code")
    openai = (f"{url}/v1", "demo", "none")
    for client, parts in (
        *((client, openai) for client in ("curl", "Python", "JavaScript", "LangChain")),
        ("Claude Code", (url, "demo", "none", "CLAUDE_CODE_MAX_CONTEXT_TOKENS=65536\n")),
        ("Anthropic SDK", (url, "demo", "none")),
        ("Codex", (f'base_url = "{url}/v1"', "model_context_window = 65536\n")),
    ):
        await page.get_by_role("tab", name=client).click()
        for part in parts:
            known = gateway_with_worker.status()["workers"]
            await expect(code, f"the gateway knows {known}").to_contain_text(part)
        if url in parts:
            await expect(code).not_to_contain_text(f"{url}/v1")
    await expect(code).not_to_contain_text("env_key")
    await page.keyboard.press("Home")
    await expect(page.get_by_role("tab", name="curl")).to_be_focused()
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.get_by_role("button", name="Copy the code for curl").click()
    await expect(page.locator("#notice")).to_have_text("Copied.")
    copied = await page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"curl {url}/v1/chat/completions")
    await page.get_by_label("Model", exact=True).select_option("gpt-4o-mini")
    await expect(code).to_contain_text('"gpt-4o-mini"')
    worker.status_report = worker.report(context_tokens=4096)
    assert gateway_with_worker.send_heartbeat(worker, context_tokens=4096).is_success
    await tab.open(url, "/")
    for client, tokens in (("Claude Code", "64,000"), ("Codex", "24,000")):
        await page.get_by_role("tab", name=client).click()
        told = (
            f"# {client} needs a model with a context of {tokens} tokens. The model demo has "
            "4,096.\n"
        )
        await expect(code).to_have_text(told)


async def test_the_page_says_why_no_model_is_ready(gateway, worker, tab) -> None:
    trouble = tab.page.locator("#trouble")
    await tab.open(gateway.url, "/")
    await expect(trouble).to_contain_text("No model is ready yet. This page shows")
    await expect(tab.page.locator("#model-list")).to_have_text("None yet.")
    progress = StartProgress(stage=StartStage.KERNELS, done=1, total=3)
    gateway.join(worker, ready=False, lanes=[], start=progress.model_dump())
    await expect(trouble).to_contain_text("No model is ready. fake-a is starting: ")
    gateway.join(worker)
    await expect(trouble).to_be_hidden()
    gateway.remove_worker(worker, restarting=True)
    await expect(trouble).to_contain_text("No model is ready. fake-a stopped at ")


async def test_a_stranger_without_a_key_sees_the_address_and_no_model(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    key = gateway_with_worker.create_key()
    limited_key = gateway_with_worker.create_key(models=["demo"])
    page = tab.page
    await tab.open(gateway_with_worker.url, "/")
    await expect(page.locator("#live")).to_have_text("Key needed")
    await expect(page.get_by_role("tabpanel").locator("code")).to_contain_text("Bearer YOUR_KEY")
    text = await page.locator("main").inner_text()
    assert "demo" not in text
    assert "fake-a" not in text
    for secret, macs in (("wrong", 0), (limited_key["secret"], 0), (key["secret"], 1)):
        await page.get_by_label("Your key").fill(secret)
        await page.keyboard.press("Enter")
        if secret == "wrong":
            await expect(page.get_by_role("alert").last).to_contain_text("does not accept this key")
            continue
        await expect(page.get_by_role("article", name="demo")).to_be_visible()
        await expect(page.locator("#mac-list article")).to_have_count(macs)
        assert secret not in await page.content()
        await tab.button("Sign out").click()
        await expect(page.locator("#live")).to_have_text("Key needed")


async def test_the_api_reference_is_accessible_and_reads_no_key_that_another_page_stored(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_worker)
    await expect(page.locator("#active-version")).to_contain_text("is active")
    await page.get_by_role("link", name="Docs").click()
    await expect(page.locator("#operations-tag-For_clients")).to_be_visible()
    await expect(page.get_by_text("/v1/chat/completions", exact=True)).to_be_visible()
    read = "name => { try { return window[name].length } catch (error) { return error.name } }"
    for storage in ("sessionStorage", "localStorage"):
        assert await page.evaluate(read, storage) == "SecurityError"
    assert await page.evaluate("origin") == "null"
    for operation in ("/v1/chat/completions", "/admin/v1/workers/{worker_id}/cordon"):
        await page.get_by_role("button", name=operation).first.click()
    await expect(page.locator(".opblock.is-open pre").first).to_be_visible()
    for width in (1280, 375):
        await page.set_viewport_size({"width": width, "height": 800})
        await page.emulate_media(color_scheme="dark" if width == 375 else "light")
        await expect(page.locator("html.dark-mode")).to_have_count(int(width == 375))
        assert await accessibility_problems(page) == []
        assert not await page.locator("html").evaluate(IS_TOO_WIDE)
    await page.get_by_role("link", name="Policy", exact=True).click()
    await expect(page.locator("#active-version")).to_contain_text("is active")
    await page.go_back()
    await page.get_by_role("link", name="On call").click()
    await expect(page.get_by_role("heading", name="The disk is full")).to_be_visible()
    await page.get_by_role("link", name="uninstall").click()
    await expect(page.get_by_role("heading", name="Uninstall")).to_be_in_viewport()
    assert tab.errors == []


async def test_s22_a_blind_post_from_a_page_of_another_site_reaches_no_worker(
    gateway_with_worker, worker, second_worker, browser
) -> None:
    page = await browser.new_page()
    # Any page of another origin will do.
    await page.goto(second_worker.url.replace("127.0.0.1", "localhost"))
    url = f"{gateway_with_worker.url}/v1/chat/completions"
    assert await page.evaluate(POST, [url, BODY]) == "opaque"
    await page.close()
    assert gateway_with_worker.status()["outcomes"] == {"refused": 1}
    assert not worker.requests
