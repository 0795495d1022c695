"""Take pictures of all pages, wide and narrow, light and dark: `make pictures`.

The pages belong to a gateway with two scripted workers, so nothing on them is a measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import httpx
from PIL import Image
from playwright.async_api import Browser, async_playwright

from tests.support.heartbeats import send_heartbeats
from tests.support.running_gateway import RunningGateway, chat_body, make_settings, running_server
from tests.support.scripted_worker import ScriptedWorker

_FOLDER = Path(__file__).parents[1] / "docs" / "pages"
_LIMIT_BYTES = 2_000_000
_WIDTHS = (1440, 390)
_SCHEMES = ("light", "dark")
_HEIGHTS = {1440: 1600, 390: 1800}
"""The most that a picture shows of a long page."""
_ROUNDS = 20
# A path and a selector of what appears last.
_PAGES = {
    "start": ("/", "#mac-list article"),
    "try": ("/try", "main"),
    "live": ("/dashboard", "#chart-answer canvas"),
    "workers": ("/admin#workers", "#workers article"),
    "keys": ("/admin#keys", "#keys tbody tr"),
    "policy": ("/admin#policy", "#history li"),
    "docs": ("/docs", ".opblock"),
}


def main() -> None:
    """Take the pictures; fail if they are too large together."""
    _FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as state, contextlib.ExitStack() as stack:
        gateway = stack.enter_context(RunningGateway(make_settings(Path(state))))
        for name in ("studio-1", "studio-2"):
            worker = ScriptedWorker(worker_id=name)
            stack.enter_context(running_server(worker, sockets=[worker.socket]))
            stack.enter_context(send_heartbeats(gateway, worker))
        shown = gateway.client.get("/").json()["pages"]
        pages = {name: page for name, page in _PAGES.items() if page[0].partition("#")[0] in shown}
        asyncio.run(_take_all(gateway, pages))
    size_bytes = sum(file.stat().st_size for file in _FOLDER.glob("*.png"))
    if size_bytes > _LIMIT_BYTES:
        sys.exit(f"The pictures have {size_bytes:,} bytes together, more than {_LIMIT_BYTES:,}.")


async def _take_all(gateway: RunningGateway, pages: Mapping[str, tuple[str, str]]) -> None:
    async with async_playwright() as playwright:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = await playwright.chromium.launch(executable_path=executable)
        await _ask(gateway)
        for width in _WIDTHS:
            for scheme in _SCHEMES:
                await _take(browser, gateway, pages, width, scheme)
        await browser.close()


async def _ask(gateway: RunningGateway) -> None:
    """Send some requests of two keys, so that the pages have something to show."""
    secrets = [
        gateway.create_key(name=name, team=team)["secret"]
        for name, team in (("Ann", "research"), ("build server", "platform"))
    ]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
        for number in range(_ROUNDS):
            for secret in secrets:
                headers = {"authorization": f"Bearer {secret}"}
                body = chat_body(stream=True, temperature=0 if number % 3 else 1)
                await client.post("/v1/chat/completions", json=body, headers=headers)
            await asyncio.sleep(1)
    gateway.use_key(secrets[0])


async def _take(
    browser: Browser,
    gateway: RunningGateway,
    pages: Mapping[str, tuple[str, str]],
    width: int,
    scheme: str,
) -> None:
    context = await browser.new_context(viewport={"width": width, "height": 900})
    tab = await context.new_page()
    await tab.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    await tab.goto(f"{gateway.url}/admin#admin-key={gateway.admin_key}")
    key = gateway.client.headers["authorization"].removeprefix("Bearer ")
    await tab.evaluate("key => sessionStorage.setItem('paceline-key', key)", key)
    for name, (path, last) in pages.items():
        await tab.goto("about:blank")  # the sections of a page load anew
        await tab.goto(gateway.url + path)
        await tab.locator(last).first.wait_for()
        await tab.wait_for_timeout(2000)  # charts draw after the first events
        content = await tab.screenshot(full_page=True)
        picture = Image.open(io.BytesIO(content)).convert("RGB")
        picture = picture.crop((0, 0, width, min(picture.height, _HEIGHTS[width])))
        picture.quantize(256).save(_FOLDER / f"{name}-{width}-{scheme}.png", optimize=True)
    await context.close()


if __name__ == "__main__":
    main()
