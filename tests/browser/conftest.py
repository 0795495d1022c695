"""A real browser, and tabs that record every error of a page."""

import shutil
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, async_playwright, expect

from tests.support.browser_tab import BrowserTab, open_context
from tests.support.gateway_fixtures import *  # noqa: F403
from tests.support.heartbeats import gateway_with_worker  # noqa: F401

# A slow page on a busy machine is no failure.
expect.set_options(timeout=60_000)
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[BrowserContext]:
    """Yield one Chromium for the whole session, whose tabs share a cache and no key."""
    executable = next((path for path in map(shutil.which, NAMES) if path), None)
    if executable is None and sys.platform != "darwin":
        pytest.skip("Chromium is not installed; `scripts/setup dev` installs it")
    async with async_playwright() as playwright:
        # Where there is no GPU, to draw as if there were one takes a fifth of the time.
        chromium = await playwright.chromium.launch(
            executable_path=executable, args=["--disable-gpu"]
        )
        try:
            yield await open_context(chromium)
        finally:
            await chromium.close()


@pytest_asyncio.fixture(loop_scope="session")
async def tab(browser: BrowserContext) -> AsyncIterator[BrowserTab]:
    """Yield a new tab; fail if its page caused an error or requested another origin."""
    tab = BrowserTab(await browser.new_page())
    yield tab
    await tab.page.close()
    assert tab.errors == []
