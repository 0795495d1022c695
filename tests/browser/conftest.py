"""A real browser before a real gateway, watched for whatever a page must not do."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright, expect

from tests.support.browser_tab import BrowserTab
from tests.support.gateway_fixtures import (  # noqa: F401
    clean_environment,
    gateway,
    redis,
    second_worker,
    session_redis,
    worker,
)
from tests.support.heartbeats import send_heartbeats
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import ScriptedWorker

# A machine that does other things beside the tests is slow, not wrong.
expect.set_options(timeout=20_000)
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """One Chromium for the whole session."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None and sys.platform != "darwin":
        pytest.skip("the page is tested in Chromium, and none is here; `scripts/setup dev` gets it")
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=found)
        try:
            yield running
        finally:
            await running.close()


@pytest.fixture
def gateway_with_worker(
    gateway: RunningGateway,  # noqa: F811
    worker: ScriptedWorker,  # noqa: F811
) -> Iterator[RunningGateway]:
    """A gateway that the fake worker has joined and stays with."""
    with send_heartbeats(gateway, worker):
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def tab(browser: Browser) -> AsyncIterator[BrowserTab]:
    """A tab of its own; at the end nothing may have left its origin, and no rule been broken."""
    tab = await BrowserTab.open(browser)
    yield tab
    await tab.context.close()
    assert tab.errors == []
