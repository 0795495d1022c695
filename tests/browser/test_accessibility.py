"""Every page for all people: under axe-core, by keyboard alone, on a phone, dark and light.

`make pictures` checks the pages of a gateway with traffic at each width in each scheme.
"""

from collections.abc import AsyncIterator
from typing import Literal

import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, Page, expect

from tests.support.accessibility import accessibility_problems
from tests.support.browser_tab import BrowserTab
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import Script, ScriptedWorker

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCREENS: tuple[tuple[int, Literal["light", "dark"], str], ...] = (
    (1440, "light", "rgb(246, 246, 243)"),
    (375, "dark", "rgb(18, 20, 22)"),
)
"""Widths, schemes and their backgrounds."""
PAGES = {
    "/": "#models",
    "/try": "main",
    "/dashboard": "article",
    "/docs/policy.md": "article table",
    "/admin#workers": "article",
    "/admin#policy": "#history li",
    "/admin#keys": "#keys tbody tr",
}
"""Each page, and what is visible once it has loaded.

That of keys is the last: once there is one, the others ask for it.
"""
DIALOGS = {"/admin#keys": "New key", "/admin#workers": "Add a Mac"}
IS_TOO_WIDE = "element => element.scrollWidth > element.clientWidth"
NAMES = """
() => [...document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [contenteditable=true]"
  )].filter(element => !element.disabled && element.tabIndex >= 0 && element.checkVisibility({
    visibilityProperty: true, contentVisibilityAuto: true
  }) && element.getClientRects().length).map(element => element.outerHTML.slice(0, 120))
"""
RECORD_STOPS = """
() => {
  const shows = element => {
    const style = getComputedStyle(element);
    return style.outlineStyle !== "none" || style.boxShadow !== "none";
  };
  window.stops = [];
  addEventListener("focusin", ({ target }) => window.stops.push({
    html: target.outerHTML.slice(0, 120),
    shown: shows(target) || shows(target.closest(".editor") ?? target),
  }));
  addEventListener("focusout", ({ relatedTarget }) => relatedTarget ?? window.stops.push(null));
}
"""
"""Record each element that gets the focus, and null when the focus leaves the page."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def visited(
    module_gateway: RunningGateway, module_worker: ScriptedWorker, browser: BrowserContext
) -> AsyncIterator[tuple[RunningGateway, BrowserTab]]:
    """Yield a gateway with traffic, and a tab that has signed in at it."""
    assert module_gateway.chat(temperature=0).status_code == 200
    module_worker.script = Script(status=500)
    assert module_gateway.chat().status_code == 502
    module_worker.script = Script()
    tab = BrowserTab(await browser.new_page())
    await tab.open_admin(module_gateway)
    yield module_gateway, tab
    await tab.page.close()


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_serves_people_with_a_screen_reader_a_keyboard_or_a_phone(
    visited: tuple[RunningGateway, BrowserTab], path: str
) -> None:
    gateway, tab = visited
    page = tab.page
    if path == "/admin#keys":
        gateway.create_key(name="A key with quite a long name for a phone", team="research")
    await page.goto("about:blank")  # so that a section is loaded anew
    await page.goto(gateway.url + path)
    await expect(page.locator(PAGES[path]).first).to_be_visible()
    await tab_through(page)
    if path == "/try":
        await page.get_by_role("button", name="Count from 1 to 20.").click()
        await expect(page.locator(".answer .facts strong").first).to_be_visible()
    html = page.locator("html")
    for width, scheme, background in SCREENS:
        await page.set_viewport_size({"width": width, "height": 900})
        await page.emulate_media(color_scheme=scheme)
        assert await accessibility_problems(page) == []
        assert not await html.evaluate(IS_TOO_WIDE)
        shown = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shown == background
    if path in DIALOGS:
        await tab.button(DIALOGS[path]).click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_be_visible()
        assert await accessibility_problems(page) == []
        for element in (html, dialog):
            assert not await element.evaluate(IS_TOO_WIDE)
    assert tab.errors == []


async def tab_through(page: Page) -> None:
    """Check that Tab skips the navigation first, reaches all that a mouse can, and leaves."""
    names = await page.evaluate(NAMES)
    await page.evaluate(RECORD_STOPS)
    stops: list[dict[str, str] | None] = []
    # A section may have taken the focus: only the second time begins at the top.
    while stops.count(None) < 2:
        assert len(stops) < 4 * len(names) + 10, "Tab never leaves the page"
        for _ in range(len(names) + 2):
            await page.keyboard.press("Tab")
        stops = await page.evaluate("stops")
    reached = [stop for stop in stops if stop]
    first = stops[stops.index(None) + 1]
    assert first is not None
    assert 'class="skip"' in first["html"]
    # What a page has filled in meanwhile has another name.
    names = [name for name in await page.evaluate(NAMES) if name in names]
    assert {*names} <= {stop["html"] for stop in reached}
    assert [stop["html"] for stop in reached if not stop["shown"]] == []
