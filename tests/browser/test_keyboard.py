"""Every page by keyboard alone: Tab reaches all that a mouse can, shows where it is, and leaves."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.support.browser_tab import BrowserTab
from tests.support.running_gateway import RunningGateway

IN_BROWSER = pytest.mark.asyncio(loop_scope="session")
PAGES = {
    "/": "#models",
    "/try": "main",
    "/dashboard": "main",
    "/admin#workers": "main",
    "/admin#keys": "main",
    "/admin#policy": "#active-version",
}
"""Each page, and what is visible once it has loaded."""
USABLE = """
() => [...document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [contenteditable=true]"
  )].filter(element => !element.disabled && element.tabIndex >= 0 && element.checkVisibility({
    visibilityProperty: true, contentVisibilityAuto: true
  }) && element.getClientRects().length)
"""
NAMES = f"() => ({USABLE})().map(element => element.outerHTML.slice(0, 120))"
FOCUSED = """
() => {
  const element = document.activeElement;
  const shows = shown => {
    const style = getComputedStyle(shown);
    return style.outlineStyle !== "none" || style.boxShadow !== "none";
  };
  return {
    shown: shows(element) || shows(element.closest(".editor") ?? element),
    inside: element !== document.body,
    html: element.outerHTML.slice(0, 120),
  };
}
"""


@IN_BROWSER
@pytest.mark.parametrize("path", PAGES)
async def test_tab_reaches_everything_on_a_page_and_shows_where_it_is(
    gateway_with_worker: RunningGateway, tab: BrowserTab, path: str
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_worker)
    await page.goto(gateway_with_worker.url + path)
    await expect(page.locator(PAGES[path])).to_be_visible()
    names = await page.evaluate(NAMES)
    reached, hidden, ends = set(), [], 0
    for _ in range(2 * len(names) + 10):
        await page.keyboard.press("Tab")
        focused = await page.evaluate(FOCUSED)
        if not focused["inside"]:
            ends += 1  # a section may have taken the focus: the second time begins at the top
            if ends == 2:
                break
            continue
        reached.add(focused["html"])
        if not focused["shown"]:
            hidden.append(focused["html"])
    else:
        pytest.fail("Tab never leaves the page")
    # What a page has filled in meanwhile has another name.
    names = [name for name in await page.evaluate(NAMES) if name in names]
    assert [name for name in names if name not in reached] == []
    assert hidden == []
