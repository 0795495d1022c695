"""A full disk under the state folder of a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from bench.attack.attack import Attack, request
from bench.attack.http_client import Answer
from bench.attack.stack import attacked_gateway
from bench.harness.parts import ADMIN_KEY, Part, fixed_port, wait_until_up

_DISK_BYTES: Final = 96 * 1024
_UNSTORED: Final = "revocation_unstored"
_FULL: Final = frozenset(("state_unavailable", "write_unconfirmed", _UNSTORED))
_EDITS: Final = 400

Limit = Callable[[], None] | None


class FullDisk(Attack):
    """A small tmpfs that edits fill; if none can be mounted, a limit on the size of files."""

    name = "full disk"
    promise = "an edit is stored or refused, revoked keys stay revoked, the rest goes on"
    share = 0.04

    async def run(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.target.home) as folder:
            home, self._port = Path(folder), fixed_port()
            async with _small_disk(home / "state") as limit:
                kind = "RLIMIT_FSIZE of the gateway" if limit else "tmpfs"
                self.tally.notes.append(f"{kind} of {_DISK_BYTES:,} bytes")
                gateway = attacked_gateway(home, self._port)
                try:
                    while True:
                        await self._fill(gateway, limit)
                        if time.monotonic() >= self.deadline_s:
                            break
                finally:
                    await gateway.stop()
            if gateway.tracebacks():
                self.tally.fail("a traceback in the log", gateway.log.read_text()[-500:])

    async def _fill(self, gateway: Part, limit: Limit) -> None:
        """Create and revoke keys until the disk is full; restart, and compare what is stored."""
        await gateway.start(limit)
        await wait_until_up(self._port)
        stored: dict[str, tuple[str, int]] = {}  # secret and the status that it gets, by id
        unstored: set[str] = set()  # revoked until a restart, or longer
        refused = 0
        for _ in range(_EDITS):
            if refused > 20:
                break
            if stored and self.rng.random() < 0.3:
                name = self.rng.choice(list(stored))
                answer = await self._admin(f"keys/{name}", method="DELETE")
                if answer.status == 200 or answer.code == _UNSTORED:
                    stored[name] = stored[name][0], 401
                    (unstored.add if answer.status != 200 else unstored.discard)(name)
            else:
                answer = await self._admin("keys", {"name": f"{len(stored):060}", "team": "x" * 60})
                if answer.status == 201:
                    created = answer.json()
                    stored[created["id"]] = created["secret"], 200
            self.tally.begin("an edit")
            self.tally.answer(answer, "an edit", allowed=_FULL)
            refused += answer.status == 503
        if not refused:
            self.tally.fail("the disk was never full", len(stored))
        await self._compare(stored, "while the disk is full")
        await gateway.kill()
        await gateway.start(limit)
        await wait_until_up(self._port)
        for name in unstored:
            del stored[name]
        await self._compare(stored, "after kill -9 on a full disk")
        await gateway.stop()
        for file in (gateway.home / "state").iterdir():
            file.unlink()

    async def _admin(self, path: str, body: Any = None, *, method: str = "") -> Answer:
        path = f"/admin/v1/{path}"
        return await request(self._port, path, body, method=method, key=ADMIN_KEY)

    async def _compare(self, stored: dict[str, tuple[str, int]], when: str) -> None:
        for secret, expected in stored.values():
            self.tally.begin(when)
            answer = await request(self._port, "/v1/models", key=secret)
            self.tally.answer(answer, when)
            if answer.status != expected:
                self.tally.fail(f"{answer.status} for a key, not {expected}", when)


@contextlib.asynccontextmanager
async def _small_disk(folder: Path) -> AsyncIterator[Limit]:
    """Mount a small disk; yield None, or what a process must call to get a limit instead."""
    await asyncio.to_thread(folder.mkdir, 0o700)
    options = f"size={_DISK_BYTES},mode=0700"
    mounted = await _succeeds("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield None if mounted else _limit_files
    finally:
        if mounted:
            await _succeeds("umount", str(folder))


async def _succeeds(*command: str) -> bool:
    if os.geteuid() or not shutil.which(command[0]):
        return False
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    return done.returncode == 0


def _limit_files() -> None:
    """Bound the size of each file that this process writes, its log too."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (_DISK_BYTES // 4, _DISK_BYTES // 4))
