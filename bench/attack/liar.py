"""The servers of lying workers: they send what an attack has prepared."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

from bench.attack.http_client import Answer, encode, send
from bench.attack.lies import head
from bench.harness.parts import JOIN_TOKEN
from paceline.protocol import WorkerReport
from tests.support.scripted_worker import chunk, lane_report

MODEL: Final = "liar"
"""The name of the model and of the worker."""
ENDLESS: Final = "endless"
"""A message that gets a stream without an end."""
LATE: Final = "late"
"""A message that gets its answer so late that the gateway sends the head of the stream before."""
_LATE_S: Final = 2.0
"""A gateway checks once a second whether a head is due."""
_SLOTS: Final = 64


def report(worker_id: str, port: int, *, model: str = MODEL, boot: str = "1") -> dict[str, Any]:
    return WorkerReport(
        worker_id=worker_id,
        boot_id=boot,
        url=f"http://127.0.0.1:{port}",
        model=model,
        context_tokens=4096,
        lanes=tuple(lane_report(name, slots=_SLOTS) for name in ("text-mtp", "vlm")),
    ).model_dump(mode="json")


async def send_heartbeat(gateway_port: int, sent: object, worker_id: str) -> Answer:
    path = f"/admin/v1/workers/{worker_id}"
    raw = json.dumps(sent).encode()
    return await send(gateway_port, encode(raw, path=path, method="PUT", key=JOIN_TOKEN))


class LyingServer:
    """Servers of lying workers: one that answers requests, and some that have reports alone."""

    def __init__(self) -> None:
        self.lies: dict[str, list[bytes]] = {}
        """Answers by the text of the last message."""
        self.reports: dict[int, bytes] = {}
        """Bodies of `/v1/status` of workers that only report, by port."""
        self.port = 0
        self._boot = 0

    async def join(self, gateway_port: int, *, restarted: bool = False) -> None:
        """Send an honest heartbeat of the worker that lies in its answers.

        A gateway trusts another boot again, whatever the last one answered.
        """
        self._boot += restarted
        await send_heartbeat(gateway_port, self._report(), MODEL)

    def _report(self) -> dict[str, Any]:
        return report(MODEL, self.port, boot=str(self._boot))

    @contextlib.asynccontextmanager
    async def listening(self, reporting: int) -> AsyncIterator[None]:
        """Listen on one port for the worker, and on others for its reports."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(1 + reporting):
                server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
                stack.push_async_callback(server.wait_closed)
                stack.callback(server.close)
                port = int(server.sockets[0].getsockname()[1])
                if self.port:
                    self.reports[port] = b"{}"
                else:
                    self.port = port
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            received = (await reader.readuntil(b"\r\n\r\n")).lower()
            if received.startswith(b"get "):
                honest = json.dumps({"report": self._report()}).encode()
                body = self.reports.get(writer.get_extra_info("sockname")[1], honest)
                writer.write(head("200 OK", "connection: close", length=len(body)) + body)
            else:
                length = int(received.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
                request = json.loads(await reader.readexactly(length))
                await self._answer(request["messages"][-1]["content"], writer)
            await writer.drain()
        writer.close()

    async def _answer(self, text: str, writer: asyncio.StreamWriter) -> None:
        if text.startswith(ENDLESS):
            writer.write(head(stream=True))
            piece = chunk({"content": "x" * 1000})
            while True:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0)
        if text.startswith(LATE):
            await asyncio.sleep(_LATE_S)
        for piece in self.lies.pop(text, ()):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
