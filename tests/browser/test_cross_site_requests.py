"""S22 in a real browser: a page of another site posts to a gateway without keys."""

from __future__ import annotations

import pytest
from playwright.async_api import BrowserContext

from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.asyncio(loop_scope="session")

POST = """async ([url, body]) => {
  const sent = { method: "POST", mode: "no-cors", headers: { "content-type": "text/plain" }, body };
  return (await fetch(url, sent)).type;
}"""
BODY = '{"model": "demo", "messages": [{"role": "user", "content": "x"}]}'


async def test_a_blind_post_from_a_page_of_another_site_reaches_no_worker(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    browser: BrowserContext,
) -> None:
    page = await browser.new_page()
    # Any page of another origin will do.
    await page.goto(second_worker.url.replace("127.0.0.1", "localhost"))
    url = f"{gateway_with_worker.url}/v1/chat/completions"
    assert await page.evaluate(POST, [url, BODY]) == "opaque"
    await page.close()
    assert gateway_with_worker.status()["outcomes"] == {"refused": 1}
    assert not worker.requests
