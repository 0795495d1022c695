"""Pages with the demo model: the dashboard under traffic, and the page on which one tries it."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import expect

from tests.support.browser_tab import BrowserTab
from tests.support.openai_requests import picture_body, text_body
from tests.support.paceline_process import UpProcess, running_up

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SYSTEM = "You are a careful assistant who answers in few words. " * 12
SHOWN_VALUES = """[...document.querySelectorAll("#view-line [data-of]")].map(
  ({ dataset, textContent }) => [dataset.of, dataset.value, textContent])"""
# They change without requests.
CHANGING = {"gateway/uptime_s"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    with running_up(tmp_path_factory.mktemp("demo")) as process:
        yield process


def mixed_bodies(model: str) -> list[dict[str, Any]]:
    shared_system = [{"role": "system", "content": SYSTEM}]
    return [
        *(
            text_body(model, temperature=0, max_tokens=64, draft_tokens=2, stream=True)
            for _ in range(4)
        ),
        *(text_body(model, temperature=1, seed=n, max_tokens=48, stream=True) for n in range(2)),
        picture_body(model, "red", temperature=0, max_tokens=16),
        *(
            {**body, "messages": shared_system + body["messages"]}
            for body in (text_body(model, temperature=0, max_tokens=16) for _ in range(2))
        ),
    ]


async def send_all(process: UpProcess, bodies: list[dict[str, Any]], *, concurrency: int) -> None:
    semaphore = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=process.url, timeout=120) as client:

        async def send(body: dict[str, Any]) -> None:
            async with semaphore:
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text

        await asyncio.gather(*map(send, bodies))


def value_at(status: Any, path: str) -> Any:
    for name in path.split("/"):
        status = status[int(name)] if isinstance(status, list) else status[name]
    return status


async def test_the_numbers_on_the_page_equal_the_status_and_a_new_viewer_sees_them_too(
    up: UpProcess, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open(up.url, "/dashboard")
    await expect(page.locator("#saved-mtp-line")).to_have_text("No request yet")

    bodies = mixed_bodies(up.model)
    sending = asyncio.create_task(send_all(up, bodies * 2, concurrency=4))
    await expect(page.locator("#tracks .mark").first).to_be_attached()
    await sending

    async with httpx.AsyncClient(base_url=up.url, timeout=60) as client:
        differences: list[Any] = ["not compared yet"]
        ended_s = time.monotonic() + 60
        while time.monotonic() < ended_s:  # the next report of the worker has the last counts
            status = (await client.get("/v1/status")).json()
            values = await page.evaluate(SHOWN_VALUES)
            differences = [
                (path, value, value_at(status, path))
                for path, value, _ in values
                if path not in CHANGING and json.loads(value) != value_at(status, path)
            ]
            if not differences and status["outcomes"]["completed"] == len(bodies) * 2:
                break
            await asyncio.sleep(0.2)
    assert differences == []
    assert len(values) > 40
    assert status["mtp"]["accepted"] > 0
    assert status["prefix"]["hit"] > 0
    texts = {path: text for path, _, text in values}
    if status["savings"]["decode_s"] < 0:  # possible on a busy machine
        saved_by_mtp = page.locator("#saved-mtp-line")
        await expect(saved_by_mtp).to_have_text("Drafting has cost more time than it has saved")
    else:
        assert texts["savings/decode_steps"] == f"{status['savings']['decode_steps']:,}"
    assert texts["savings/prompt_tokens"] == f"{status['savings']['prompt_tokens']:,}"
    assert texts["mtp/mean_acceptance_length"] == f"{status['mtp']['mean_acceptance_length']:.2f}"
    bypassed = status["mtp"]["bypass_counts"]
    assert bypassed.keys() <= {"mtp_not_paying"}, "sampled requests and pictures speculate too"
    reasons = "Drafting did not pay" if bypassed else "No requests without drafts so far."
    await expect(page.locator("#reasons p").first).to_have_text(reasons)
    await expect(page.locator("#chart-acceptance .nothing")).to_be_hidden()
    points = await page.evaluate("document.querySelectorAll('.chart canvas').length")
    assert points == 4
    positions = status["mtp"]["acceptance_rate_per_position"]
    await expect(page.locator(".position")).to_have_count(len(positions))

    # The gateway sends its whole window to each new viewer.
    await page.reload()
    await expect(page.locator("#accepted-line")).to_contain_text("tokens per step")
    for chart in ("acceptance", "tokens", "first-token", "answer"):
        await expect(page.locator(f"#chart-{chart} .nothing")).to_be_hidden()
    await expect(page.locator("#speeds tbody tr")).to_have_count(5)


async def test_a_question_shows_its_drafted_tokens_and_where_it_ran(up, tab) -> None:
    page = tab.page
    await tab.open(up.url, "/")
    await page.get_by_role("link", name="Try it").click()
    await page.get_by_role("button", name="Count from 1 to 20.").click()
    answer = page.get_by_role("article", name=f"Answer of {up.model}")
    await expect(answer.locator(".facts")).to_contain_text("in the pool text-mtp")
    await expect(answer.locator(".content")).to_contain_text("1, 2, 3, 4, 5")
    facts = await answer.locator(".facts").inner_text()
    accepted, total = map(int, re.findall(r"(\d+) of (\d+) tokens", facts)[0])
    assert f"The answer has {total} tokens" in facts
    assert 0 < accepted < total
    first = "content => content.querySelector('p').firstChild.nodeName"
    # No draft can precede the first token.
    assert await answer.locator(".content").evaluate(first) == "#text"
    marked = "".join(await answer.locator(".drafted").all_inner_texts())
    text = await answer.locator(".content").inner_text()
    assert 0 < len(marked) < len(text)

    await page.locator("#files").set_input_files(ROOT / "docs" / "circle.png")
    await page.get_by_label("Question").fill("What color is the circle?")
    await page.keyboard.press("Enter")
    await expect(answer.nth(1).locator(".facts")).to_contain_text("in the pool vlm")
    await expect(answer.nth(1)).to_contain_text("red")
    code = page.get_by_role("region", name="Code for curl")
    await expect(code).to_contain_text('"url":"data:image/png;base64,..."')
