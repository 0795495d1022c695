"""Every page under axe-core, on a phone and on a wide screen, dark and light.

`make pictures` checks the pages of a gateway with traffic at each width in each scheme.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.browser.test_keyboard import PAGES
from tests.support.accessibility import accessibility_problems
from tests.support.browser_tab import BrowserTab
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import Script, ScriptedWorker

pytestmark = pytest.mark.asyncio(loop_scope="session")

Screen = tuple[int, Literal["light", "dark"]]
SCREENS: tuple[Screen, ...] = ((390, "dark"), (1440, "light"))
DIALOGS = {"/admin#keys": "New key", "/admin#workers": "Add a Mac"}


async def problems_on(page: Page, *screens: Screen) -> list[str]:
    problems = []
    for width, scheme in screens:
        await page.set_viewport_size({"width": width, "height": 900})
        await page.emulate_media(color_scheme=scheme)
        problems += await accessibility_problems(page)
    return problems


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def visited(
    module_gateway: RunningGateway, module_worker: ScriptedWorker, browser: Browser
) -> AsyncIterator[tuple[RunningGateway, BrowserTab]]:
    """Yield a gateway with traffic, and a tab that has signed in at it."""
    assert module_gateway.chat(temperature=0).status_code == 200
    module_worker.script = Script(status=500)
    assert module_gateway.chat().status_code == 502
    module_worker.script = Script()
    tab = await BrowserTab.open(browser)
    await tab.open_admin(module_gateway)
    yield module_gateway, tab
    await tab.context.close()


# The page of keys is the last: once there is one, the others ask for it.
@pytest.mark.parametrize("path", ["/docs", *sorted(PAGES, key="/admin#keys".__eq__)])
async def test_axe_finds_nothing_on_a_page(
    visited: tuple[RunningGateway, BrowserTab], path: str
) -> None:
    gateway, tab = visited
    page = tab.page
    if path == "/admin#keys":
        gateway.create_key()
    await page.goto("about:blank")  # so that a section is loaded anew
    await page.goto(gateway.url + path)
    await expect(page.locator(PAGES.get(path, ".opblock")).first).to_be_visible()
    if path == "/try":
        await page.get_by_role("button", name="Count from 1 to 20.").click()
        await expect(page.locator(".answer .facts strong").first).to_be_visible()
    # The API reference is long: one screen takes as much time as both of another page.
    assert await problems_on(page, *SCREENS[path == "/docs" :]) == []
    if path in DIALOGS:
        await tab.button(DIALOGS[path]).click()
        await expect(page.get_by_role("dialog")).to_be_visible()
        assert await accessibility_problems(page) == []
    assert tab.errors == []
