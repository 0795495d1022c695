"""Every page by keyboard alone: Tab reaches all that a mouse can, shows where it is, and leaves."""

from __future__ import annotations

import pytest
from playwright.async_api import Page, expect

from tests.support.browser_tab import BrowserTab
from tests.support.running_gateway import RunningGateway

IN_BROWSER = pytest.mark.asyncio(loop_scope="session")
PAGES = {
    "/": "#models",
    "/try": "main",
    "/dashboard": "article",
    "/admin#workers": "article",
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
async def test_tab_reaches_everything_on_a_page_and_shows_where_it_is(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    await tab.open_admin(gateway_with_worker)
    for path, loaded in PAGES.items():
        await tab.page.goto("about:blank")  # so that a section is loaded anew
        await tab.page.goto(gateway_with_worker.url + path)
        await expect(tab.page.locator(loaded).first).to_be_visible()
        await tab_through(tab.page, path)


async def tab_through(page: Page, path: str) -> None:
    """Press Tab until the focus has left the page twice, at its bottom."""
    names = await page.evaluate(NAMES)
    reached, hidden, ends = set(), [], 0
    for _ in range(3 * len(names) + 10):  # Chromium may go round once more
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
        pytest.fail(f"Tab never leaves {path}")
    # What a page has filled in meanwhile has another name.
    names = [name for name in await page.evaluate(NAMES) if name in names]
    assert [name for name in names if name not in reached] == [], path
    assert hidden == [], path
