"""The fleet that the events happen to, and the four places where an admin looks."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from playwright.async_api import Browser, Page, async_playwright

from bench.harness.parts import (
    ADMIN_KEY,
    AS_ADMIN,
    Part,
    fixed_port,
    gateway_part,
    running_redis,
    wait_until_up,
    worker_part,
)
from bench.harness.servers import ROOT
from gateway.cli import main as paceline
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import running_worker
from tests.support.scripted_worker import ScriptedWorker

API_KEY: Final = "api-key-of-the-bench-on-call"
AS_CLIENT: Final = {"authorization": f"Bearer {API_KEY}"}
WORKERS: Final = ("mini", "studio")
ENGINE: Final = "lmstudio"
_DISK_BYTES: Final = 1024 * 1024
_READY_S: Final = 300.0


@dataclass(slots=True)
class OnCall:
    """A gateway with a Redis, two workers of the demo model, and an engine with a script."""

    home: Path
    port: int
    redis: RedisServer
    engine: ScriptedWorker
    client: httpx.AsyncClient
    page: Page
    gateway: Part
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> Path:
        return self.home / "state"

    @property
    def policy(self) -> Path:
        return self.home / "policy.yaml"

    async def start_worker(self, name: str, *, part: str = "", port: int = 0) -> None:
        """Start a worker; `part` names its process if that is not the worker's id."""
        flags = ("--join", self.url, "--prefix-cache-gb", "0")
        made = worker_part(self.home, port, *flags, worker_id=name, name=part or name)
        self.parts[part or name] = made
        await made.start()

    async def wait_until_ready(self, *names: str) -> None:
        """Wait until these workers take requests."""
        async with asyncio.timeout(_READY_S):
            while True:
                with contextlib.suppress(httpx.TransportError, KeyError):
                    found = (await self.client.get("/v1/status")).json()["workers"]
                    if all(found.get(name, {}).get("state") == "ready" for name in names):
                        return
                await asyncio.sleep(0.2)

    async def chat(self, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", AS_CLIENT)
        messages = [{"role": "user", "content": "Count from 1 to 20."}]
        body = {"model": "demo", "messages": messages, "max_tokens": 8, **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def admin(self, method: str, path: str, body: object = None) -> Mapping[str, Any]:
        """Send a request of an admin; return the JSON of its answer, also of an error."""
        answer = await self.client.request(method, f"/admin/v1/{path}", json=body, headers=AS_ADMIN)
        found: Mapping[str, Any] = answer.json() if answer.content else {}
        return found

    def log_size(self, part: str = "") -> int:
        """Return the bytes that a part, or the gateway, has logged."""
        return (self.parts[part] if part else self.gateway).log.stat().st_size

    async def read_page(self, path: str) -> str:
        """Return the text of a page, which stays open and refreshes itself."""
        if self.page.url.removeprefix(self.url) != path:
            await self.page.goto(self.url + path)
        return await self.page.inner_text("body")

    async def take_picture(self, path: str) -> bytes:
        """Return what a page shows first, once it has drawn itself."""
        await self.page.goto("about:blank")  # the sections of a page load anew
        await self.page.goto(self.url + path)
        await self.page.wait_for_timeout(2500)
        return await self.page.screenshot()

    async def run_command(self, arguments: tuple[str, ...]) -> str:
        """Return what a command prints, on one line; the start of Python is not of interest."""

        def run() -> str:
            printed = io.StringIO()
            with (
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(printed),
                contextlib.suppress(SystemExit),
            ):
                paceline([*arguments, "--url", self.url])
            return " ".join(printed.getvalue().split())

        running = asyncio.create_task(asyncio.to_thread(run))
        try:
            return await asyncio.shield(running)
        finally:
            await running  # else it would keep the standard output of this process

    async def read_metrics(self) -> str:
        return (await self.client.get("/metrics")).text

    async def read_log(self, from_byte: int) -> str:
        written = await asyncio.to_thread(self.gateway.log.read_bytes)
        return written[from_byte:].decode(errors="replace")


@contextlib.asynccontextmanager
async def running_fleet(home: Path) -> AsyncIterator[OnCall]:
    port = fixed_port()
    os.environ |= {"PACELINE_ADMIN_KEY": ADMIN_KEY}  # of the commands; processes do not get it
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_small_disk(home / "state"))
        redis = await stack.enter_async_context(running_redis(home))
        engine = stack.enter_context(running_worker(ENGINE, model="qwen"))
        browser = await stack.enter_async_context(_browser())
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=AS_CLIENT, timeout=180)
        )
        page = await _signed_in(browser)
        policy = home / "policy.yaml"
        policy.write_bytes((ROOT / "policies" / "default.yaml").read_bytes())
        gateway = gateway_part(home, port, REDIS_URL=redis.url, API_KEY=API_KEY, POLICY=str(policy))
        fleet = OnCall(home, port, redis, engine, client, page, gateway)
        try:
            await gateway.start()
            await wait_until_up(port)
            for name in WORKERS:
                await fleet.start_worker(name)
            joined = {"id": ENGINE, "kind": "openai", "url": engine.url, "models": ["qwen"]}
            answer = await fleet.admin("POST", "engines", joined)
            assert "error" not in answer, json.dumps(answer)
            await fleet.wait_until_ready(*WORKERS, ENGINE)
            yield fleet
        finally:
            for part in (*fleet.parts.values(), gateway):
                await part.stop()


@contextlib.asynccontextmanager
async def _browser() -> AsyncIterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next((path for path in map(shutil.which, names) if path), None)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=executable, args=["--disable-gpu"]
        )
        try:
            yield browser
        finally:
            await browser.close()


async def _signed_in(browser: Browser) -> Page:
    """Return a tab whose pages have the admin key."""
    page = await browser.new_page(viewport={"width": 1080, "height": 720}, reduced_motion="reduce")
    keys = dict.fromkeys(("paceline-key", "paceline-admin-key"), ADMIN_KEY)
    await page.add_init_script(
        f"for (const [name, key] of Object.entries({json.dumps(keys)})) "
        "sessionStorage.setItem(name, key);"
    )
    return page


@contextlib.asynccontextmanager
async def _small_disk(folder: Path) -> AsyncIterator[None]:
    """Mount a small disk if this user may; else the folder is an ordinary one."""
    await asyncio.to_thread(folder.mkdir, 0o700)
    options = f"size={_DISK_BYTES},mode=0700"
    mount = ("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    mounted = not os.geteuid() and await _succeeds(*mount)
    try:
        yield
    finally:
        if mounted:
            await _succeeds("umount", str(folder))


async def _succeeds(*command: str) -> bool:
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    return done.returncode == 0
