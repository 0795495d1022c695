"""Text on which a pattern could take a minute of a browser."""

from __future__ import annotations

import pytest

from tests.support.browser_tab import BrowserTab
from tests.support.running_gateway import RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

RENDER = """async text => {
  const { MarkdownView } = await import("/try/page/markdown.js");
  const whole = document.createElement("div");
  new MarkdownView(whole, (start, end) => [text.slice(start, end)]).update(text);
  return whole.textContent.length;
}"""


PARTS = ["`", "`` ", "`a", "[", "[a](http://x", "**a ", "*a ", "_a ", "http://....", "`*_[", "***a"]


async def test_l15_no_text_takes_more_than_linear_time(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    """With a cube, or a square, of its length the browser would not answer within its timeout."""
    await tab.open_start(gateway_with_worker.url)
    await tab.page.get_by_role("link", name="Try it").click()
    for part in PARTS:
        text = ("a" + part * 20_000)[:19_999]
        assert await tab.page.evaluate(RENDER, text) > 0, part
