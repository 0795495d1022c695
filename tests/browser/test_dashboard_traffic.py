"""The page under real traffic of the demo model: what it shows is what `/v1/status` says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.async_api import expect

from tests.support.browser_tab import BrowserTab
from tests.support.openai_requests import picture_body, text_body
from tests.support.paceline_process import UpProcess, running_up

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

SYSTEM = "You are a careful assistant who answers in few words. " * 12
PLACES = """[...document.querySelectorAll("#view-line [data-of]")].map(
  ({ dataset, textContent }) => [dataset.of, dataset.value, textContent])"""
# They move on by themselves.
CLOCKS = {"gateway/uptime_s"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """`paceline up` on the demo model."""
    with running_up(tmp_path_factory.mktemp("demo")) as running:
        yield running


def mixed(model: str) -> list[dict[str, Any]]:
    asked_twice = [{"role": "system", "content": SYSTEM}]
    return [
        *(text_body(model, temperature=0, max_tokens=64, stream=True) for _ in range(4)),
        *(text_body(model, temperature=1, seed=n, max_tokens=48, stream=True) for n in range(2)),
        picture_body(model, "red", temperature=0, max_tokens=16),
        *(
            {**body, "messages": asked_twice + body["messages"]}
            for body in (text_body(model, temperature=0, max_tokens=16) for _ in range(2))
        ),
    ]


async def ask_all(line: UpProcess, bodies: list[dict[str, Any]], *, at_a_time: int) -> None:
    room = asyncio.Semaphore(at_a_time)
    async with httpx.AsyncClient(base_url=line.url, timeout=120) as client:

        async def one(body: dict[str, Any]) -> None:
            async with room:
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text

        await asyncio.gather(*map(one, bodies))


def at(status: Any, path: str) -> Any:
    for name in path.split("/"):
        status = status[int(name)] if isinstance(status, list) else status[name]
    return status


async def test_the_numbers_on_the_page_are_those_of_the_status(
    up: UpProcess, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_dashboard(up.url)
    await expect(page.locator("#saved-mtp-line")).to_have_text("No request yet")

    bodies = mixed(up.model)
    asking = asyncio.create_task(ask_all(up, bodies * 3, at_a_time=4))
    await expect(page.locator("#tracks .mark").first).to_be_attached()
    await asking

    async with httpx.AsyncClient(base_url=up.url) as client:
        different: list[Any] = ["not looked yet"]
        for _ in range(100):  # the last counts come with the worker's next word
            status = (await client.get("/v1/status")).json()
            shown = await page.evaluate(PLACES)
            different = [
                (path, value, at(status, path))
                for path, value, _ in shown
                if path not in CLOCKS and json.loads(value) != at(status, path)
            ]
            if not different and status["outcomes"]["completed"] == len(bodies) * 3:
                break
            await asyncio.sleep(0.2)
    assert different == []
    assert len(shown) > 40
    assert status["mtp"]["accepted"] > 0
    assert status["prefix"]["hit"] > 0
    texts = {path: text for path, _, text in shown}
    if status["savings"]["decode_s"] < 0:  # on a busy machine, in so short a time
        line = page.locator("#saved-mtp-line")
        await expect(line).to_have_text("Drafting has cost more time than it saved so far")
    else:
        assert texts["savings/decode_steps"] == f"{status['savings']['decode_steps']:,}"
    assert texts["savings/prompt_tokens"] == f"{status['savings']['prompt_tokens']:,}"
    assert texts["mtp/mean_acceptance_length"] == f"{status['mtp']['mean_acceptance_length']:.2f}"
    assert texts["mtp/bypass_counts/non_greedy_sampling"] == "6"
    assert "mtp/bypass_counts/media" not in texts, "greedy questions about pictures speculate"

    await expect(page.locator("#reasons")).to_contain_text("The request samples")
    await expect(page.locator("#chart-acceptance .nothing")).to_be_hidden()
    points = await page.evaluate("document.querySelectorAll('.chart canvas').length")
    assert points == 4
    positions = status["mtp"]["acceptance_rate_per_position"]
    await expect(page.locator(".position")).to_have_count(len(positions))


async def test_who_comes_later_sees_what_was_before(up: UpProcess, tab: BrowserTab) -> None:
    """The gateway tells of its window, so that nobody begins with an empty page."""
    await ask_all(up, mixed(up.model), at_a_time=4)
    await tab.open_dashboard(up.url)
    await expect(tab.page.locator("#accepted-line")).to_contain_text("tokens per step")
    for chart in ("acceptance", "tokens", "first-token", "answer"):
        await expect(tab.page.locator(f"#chart-{chart} .nothing")).to_be_hidden()
    await expect(tab.page.locator("#speeds tbody tr")).to_have_count(5)
