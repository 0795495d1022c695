"""A full disk under the state folder of a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any, Final

from bench.attack.attack import Answer, Tally, Target
from bench.attack.http_client import request
from bench.attack.stack import (
    ADMIN_KEY,
    Part,
    fixed_port,
    gateway_part,
    wait_until_up,
)

_DISK_BYTES: Final = 96 * 1024
_FULL: Final = frozenset(("state_unavailable", "write_unconfirmed"))
_EDITS: Final = 400


class FullDisk:
    """A small tmpfs that edits fill; if none can be mounted, a limit on the size of files."""

    name = "full disk"
    promise = "an edit is stored or refused, revoked keys stay revoked, the rest goes on"
    share = 0.04

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        with tempfile.TemporaryDirectory(dir=target.home) as folder:
            home, port = Path(folder), fixed_port()
            async with _small_disk(home / "state") as limit:
                kind = "RLIMIT_FSIZE of the gateway" if limit else "tmpfs"
                tally.notes.append(f"{kind} of {_DISK_BYTES:,} bytes")
                gateway = gateway_part(home, port)
                try:
                    while True:
                        await self._fill(gateway, port, limit, rng, tally)
                        if time.monotonic() >= deadline_s:
                            break
                finally:
                    await gateway.stop()
            if gateway.tracebacks():
                tally.fail("a traceback in the log", gateway.log.read_text()[-500:])

    async def _fill(
        self,
        gateway: Part,
        port: int,
        limit: Callable[[], None] | None,
        rng: Random,
        tally: Tally,
    ) -> None:
        """Create and revoke keys until the disk is full; restart, and compare what is stored."""
        await gateway.start(limit)
        await wait_until_up(port)
        stored: dict[str, tuple[str, bool]] = {}  # secret and whether revoked, by id
        refused = 0
        for _ in range(_EDITS):
            if refused > 20:
                break
            if stored and rng.random() < 0.3:
                name = rng.choice(list(stored))
                answer = await _admin(port, f"/admin/v1/keys/{name}", method="DELETE")
                if answer.status == 200:
                    stored[name] = stored[name][0], True
            else:
                note = "x" * 60
                answer = await _admin(port, "/admin/v1/keys", {"name": note, "team": note})
                if answer.status == 201:
                    created = answer.json()
                    stored[created["id"]] = created["secret"], False
            tally.inputs += 1
            tally.answer(answer, "an edit", allowed=_FULL)
            refused += answer.status == 503
        if not refused:
            tally.fail("the disk was never full", len(stored))
        await self._compare(port, stored, "while the disk is full", tally)
        await gateway.kill()
        await gateway.start(limit)
        await wait_until_up(port)
        await self._compare(port, stored, "after kill -9 on a full disk", tally)
        await gateway.stop()
        _empty(gateway.home / "state")

    async def _compare(
        self, port: int, stored: dict[str, tuple[str, bool]], when: str, tally: Tally
    ) -> None:
        for secret, revoked in stored.values():
            answer = await request(port, "/v1/models", key=secret)
            tally.inputs += 1
            tally.answer(answer, when)
            if answer.status != (401 if revoked else 200):
                tally.fail(f"{answer.status} for a key, revoked: {revoked}", when)


def _empty(folder: Path) -> None:
    """Delete the files of a state folder."""
    for file in folder.iterdir():
        file.unlink()


async def _admin(port: int, path: str, body: Any = None, *, method: str = "") -> Answer:
    return await request(port, path, body, method=method, key=ADMIN_KEY)


@contextlib.asynccontextmanager
async def _small_disk(folder: Path) -> AsyncIterator[Callable[[], None] | None]:
    """Mount a small disk; yield None, or what a process must call to get a limit instead."""
    await asyncio.to_thread(folder.mkdir, 0o700)
    options = f"size={_DISK_BYTES},mode=0700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and await _succeeds(mount)
    try:
        yield None if mounted else _limit_files
    finally:
        if mounted:
            await _succeeds(["umount", str(folder)])


async def _succeeds(command: list[str]) -> bool:
    def run() -> bool:
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            return False

    return await asyncio.to_thread(run)


def _limit_files() -> None:
    """Bound the size of each file that this process writes, its log too."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (_DISK_BYTES // 4, _DISK_BYTES // 4))
