"""Folders that another user has prepared, before a command or a start of Paceline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from bench.attack.attack import Attack
from bench.attack.stack import attacked_gateway
from bench.harness.parts import Part, fixed_port
from bench.harness.processes import inherited
from bench.harness.servers import ROOT

_SECRET: Final = "admin-key-of-an-honest-user"
_COMMANDS: Final = ("keys list", "policy show", "keys create x", "prefix-cache clear")
_ELSEWHERE: Final = ("192.0.2.1", "planted.invalid", "192.0.2.1#127.0.0.1", "2001:db8::1")
_FILES: Final = ("", "admin-key", "join-token", "state.json", "shared-1.json")
_MODES: Final = (0o777, 0o770, 0o702, 0o1777, 0o666, 0o622, 0o755, 0o700)
_OTHERS_MAY_WRITE: Final = 0o022
_STRANGER: Final = 65_534
_ENDED_S: Final = 120.0


class PlantedFolders(Attack):
    """Working folders with settings of others, and state folders that others may write."""

    name = "planted folders"
    promise = "no key leaves this machine; no gateway starts on what others may write"
    share = 0.05

    async def run(self) -> None:
        while True:
            with tempfile.TemporaryDirectory(dir=self.target.home) as folder:
                await self.rng.choice((self._command, self._start))(Path(folder))
            if time.monotonic() > self.deadline_s:
                return

    async def _command(self, folder: Path) -> None:
        """Run a command beside settings of others; each request would come to a proxy of ours."""
        rng, tally = self.rng, self.tally
        secrets = folder / "home" / ".paceline"
        secrets.mkdir(parents=True, mode=0o700)
        (secrets / "admin-key").write_text(_SECRET)
        planted: dict[str, object] = dict.fromkeys(("host", "admin_host"), rng.choice(_ELSEWHERE))
        if rng.random() < 0.5:
            planted |= {"admin_port": rng.choice((80, 9000)), "port": 8000}
        (folder / "paceline.yaml").write_text(json.dumps(planted))
        command = rng.choice(_COMMANDS)
        async with _proxy() as (port, received):
            proxies = ("HTTP_PROXY", "http_proxy", "ALL_PROXY")
            environment = dict.fromkeys(proxies, f"http://127.0.0.1:{port}")
            environment |= {"HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", *command.split()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=inherited() | environment,
            )
            output, _ = await process.communicate()
        tally.begin(f"{command} beside {planted}")
        tally.answers["sent without a key" if received else "sent nothing"] += 1
        if _SECRET.encode() in b"".join(received):
            tally.fail("the stored key left this machine", (command, planted))
        if b"Traceback" in output or not process.returncode:
            tally.fail("no sentence", (command, planted, output[-300:]))

    async def _start(self, folder: Path) -> None:
        """Start a gateway on a state folder with one odd mode or owner."""
        state = folder / "state"
        state.mkdir(mode=0o700)
        for file in filter(None, _FILES):
            (state / file).touch(mode=0o600)
            (state / file).write_text("{}" if file.endswith("json") else _SECRET)
        odd, mode = state / self.rng.choice(_FILES), self.rng.choice(_MODES)
        odd.chmod(mode)
        stranger = os.geteuid() == 0 and self.rng.random() < 0.4
        if stranger:
            os.chown(odd, _STRANGER, _STRANGER)
        given = f"mode {mode:o}, {'a stranger' if stranger else 'the user'}, {odd.name}"
        expected = "refused" if stranger or mode & _OTHERS_MAY_WRITE else "started"
        port = fixed_port()
        gateway = attacked_gateway(folder, port)
        await gateway.start()
        self.tally.begin(given)
        got = await _outcome(gateway, port)
        await gateway.stop()
        self.tally.answers[got] += 1
        # What root owns is root's to read; a folder of a stranger is refused to others.
        if got != expected or gateway.tracebacks():
            self.tally.fail(f"{got}, not {expected}", (given, gateway.log.read_text()[-300:]))


async def _outcome(gateway: Part, port: int) -> str:
    async with asyncio.timeout(_ENDED_S):
        while gateway.alive:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return "started"
            await asyncio.sleep(0.1)
    return "refused"


@contextlib.asynccontextmanager
async def _proxy() -> AsyncIterator[tuple[int, list[bytes]]]:
    """Run a proxy that keeps what it receives, and answers nothing."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1 << 16))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], received
