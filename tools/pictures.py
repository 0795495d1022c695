"""Take pictures of all pages, wide and narrow, light and dark, and check each: `make pictures`.

The pages belong to a gateway with two workers on the demo model, while a few clients use it. All
share this machine, so no number on them is a measurement. axe-core must find nothing on any page.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.async_api import Browser, async_playwright

from tests.support.accessibility import accessibility_problems
from tests.support.running_gateway import RunningGateway, make_settings
from tests.support.scripted_worker import JOIN_TOKEN
from tests.support.worker_process import wait_until_ready, worker_process

_FOLDER = Path(__file__).parents[1] / "docs" / "pages"
_LIMIT_BYTES = 2_000_000
_WIDTHS = (1440, 390)
_SCHEMES = ("light", "dark")
_HEIGHTS = {1440: 1600, 390: 1800}
"""The most that a picture shows of a long page."""
_BEFORE_S = 40
"""The pages show this much traffic at least."""
_CLIENTS = 3
_PAUSE_S = 0.7
_LONGEST_ANSWER = 120
_SYSTEM = "You are a patient assistant. Answer in plain words, and say what you do not know. " * 6
# A path and a selector of what appears last.
_PAGES = {
    "start": ("/", "#mac-list article"),
    "try": ("/try", ".answer .facts strong"),
    "live": ("/dashboard", "#chart-answer canvas"),
    "workers": ("/admin#workers", "#workers article"),
    "keys": ("/admin#keys", "#keys tbody tr"),
    "policy": ("/admin#policy", "#history li"),
    "docs": ("/docs", ".opblock"),
}


def main() -> None:
    """Take the pictures; fail if axe finds something, or if they are too large together."""
    _FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as state, contextlib.ExitStack() as stack:
        gateway = stack.enter_context(RunningGateway(make_settings(Path(state))))
        workers = [
            stack.enter_context(
                worker_process(
                    *("--port", "0", "--id", name),
                    *("--join", gateway.url, "--token", JOIN_TOKEN),
                )
            )
            for name in ("studio-1", "studio-2")
        ]
        for worker in workers:
            wait_until_ready(worker)
        shown = gateway.client.get("/").json()["pages"]
        pages = {name: page for name, page in _PAGES.items() if page[0].partition("#")[0] in shown}
        problems = asyncio.run(_take_all(gateway, pages))
    if problems:
        sys.exit("\n".join(problems))
    size_bytes = sum(file.stat().st_size for file in _FOLDER.glob("*.png"))
    if size_bytes > _LIMIT_BYTES:
        sys.exit(f"The pictures have {size_bytes:,} bytes together, more than {_LIMIT_BYTES:,}.")


async def _take_all(gateway: RunningGateway, pages: Mapping[str, tuple[str, str]]) -> list[str]:
    """Take all pictures; return what axe finds on the pages."""
    problems = []
    async with async_playwright() as playwright:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = await playwright.chromium.launch(executable_path=executable)
        secrets = [
            gateway.create_key(name=name, team=team)["secret"]
            for name, team in (("Ann", "research"), ("build server", "platform"))
        ]
        gateway.use_key(secrets[0])
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            asking = [
                asyncio.create_task(_ask(client, secrets, first)) for first in range(_CLIENTS)
            ]
            await asyncio.sleep(_BEFORE_S)
            for width in _WIDTHS:
                for scheme in _SCHEMES:
                    problems += await _take(browser, gateway, pages, width, scheme)
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
        await browser.close()
    return problems


async def _ask(client: httpx.AsyncClient, secrets: Sequence[str], first: int) -> None:
    """Ask one question after another until cancelled, with the keys in turn."""
    bodies = _bodies()
    for number in itertools.count(first):
        headers = {"authorization": f"Bearer {secrets[number % len(secrets)]}"}
        messages, changes = bodies[number % len(bodies)]
        body = {
            "model": "demo",
            "temperature": 0,
            "max_tokens": _LONGEST_ANSWER,
            "stream": True,
            **changes,
            "messages": messages,
        }
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            await response.aread()
        await asyncio.sleep(_PAUSE_S)


def _bodies() -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Return messages and other fields of some requests; one of them is at fault."""
    picture = base64.b64encode((_FOLDER.parent / "circle.png").read_bytes()).decode()
    system = {"role": "system", "content": _SYSTEM}
    count, story, colour = (
        {"role": "user", "content": text}
        for text in (
            "Count from 1 to 20.",
            "Tell me a story about a fox.",
            [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
                {"type": "text", "text": "What colour is the shape?"},
            ],
        )
    )
    numbers = {"role": "assistant", "content": ", ".join(map(str, range(1, 21))) + "."}
    return [
        ([system, count], {}),
        ([system, count, numbers, story], {}),
        ([story], {}),
        ([colour], {}),
        ([story], {"temperature": 1}),
        ([system, story], {}),
        ([count], {}),
        ([count, numbers, count], {}),
        ([count], {"temperature": 3}),
    ]


async def _take(
    browser: Browser,
    gateway: RunningGateway,
    pages: Mapping[str, tuple[str, str]],
    width: int,
    scheme: str,
) -> list[str]:
    problems = []
    context = await browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    tab = await context.new_page()
    await tab.goto(f"{gateway.url}/admin#admin-key={gateway.admin_key}")
    key = gateway.client.headers["authorization"].removeprefix("Bearer ")
    await tab.evaluate("key => sessionStorage.setItem('paceline-key', key)", key)
    for name, (path, last) in pages.items():
        await tab.goto("about:blank")  # the sections of a page load anew
        await tab.goto(gateway.url + path)
        if path == "/try":
            await tab.get_by_role("button", name="Count from 1 to 20.").click()
        await tab.locator(last).first.wait_for()
        await tab.wait_for_timeout(2000)  # charts draw after the first events
        content = await tab.screenshot(full_page=True)
        picture = Image.open(io.BytesIO(content)).convert("RGB")
        picture = picture.crop((0, 0, width, min(picture.height, _HEIGHTS[width])))
        picture.quantize(256).save(_FOLDER / f"{name}-{width}-{scheme}.png", optimize=True)
        found = await accessibility_problems(tab)
        problems += [f"{name}, {width} px, {scheme}: {problem}" for problem in found]
    await context.close()
    return problems


if __name__ == "__main__":
    main()
