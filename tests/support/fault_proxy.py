"""A TCP proxy that breaks what it carries: between a gateway and a worker, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

_PIECE_BYTES = 65536
RESET_AT_ONCE = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a connection; bytes are counted on the way back, from the worker."""

    reset_at_connect: bool = False
    """Take the connection and reset it."""
    blackhole: bool = False
    """Take the connection and all that is sent, and carry none of it."""
    reset_after_bytes: int | None = None
    """Reset the connection behind so many bytes, as when the worker's process is killed."""
    end_after_bytes: int | None = None
    """Close this direction behind so many bytes, as if all had been said."""
    stall_after_bytes: int | None = None
    """Carry nothing more behind so many bytes, and leave the connection open."""
    drip_bytes: int | None = None
    """Carry so many bytes at a time, each with a pause before it."""
    drip_pause_s: float = 0.001


NO_FAULT = Fault()


class FaultProxy:
    """A port that leads to another one. Set `fault` for the connections that come from then on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target_port: int) -> None:
        self.fault = NO_FAULT
        self.connections = 0
        """How many were made so far."""
        self._loop = loop
        self._target_port = target_port
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._bound = _bound(0)
        """Holds the port, also while it refuses connections: then it does not listen."""
        self._address = self._bound.getsockname()
        self.listen()
        self.url = f"http://127.0.0.1:{self._address[1]}"

    @property
    def open_connections(self) -> int:
        """Count the connections that are being carried now."""
        return len(self._tasks)

    def listen(self) -> None:
        """Take connections, again on the same port where `refuse` had closed it."""
        self._run(self._listen())

    def refuse(self) -> None:
        """Close the port and reset what is open: the machine is there, the process is not."""
        self._run(self._close())

    def reset_all(self) -> None:
        """Reset every open connection and keep the port."""
        self._run(self._reset_all())

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._take, sock=self._bound)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            self._bound.close()
            self._bound = _bound(self._address[1])
        await self._reset_all()

    async def _reset_all(self) -> None:
        for writer in tuple(self._open):
            _reset(writer)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.fault.reset_at_connect or self._server is None:
            _reset(writer)
            return
        self._open.add(writer)
        carrying = self._loop.create_task(self._carry(reader, writer, self.fault))
        self._tasks.add(carrying)
        carrying.add_done_callback(self._tasks.discard)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
    ) -> None:
        there = here = None
        try:
            answers, onward = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._open.add(onward)
            try:
                there = asyncio.create_task(_forward_requests(reader, onward, fault))
                here = asyncio.create_task(_forward_responses(answers, writer, fault))
                # Either end that is gone takes the other along; a half-closed one does not.
                await asyncio.wait((there, here), return_when=asyncio.FIRST_COMPLETED)
                if not there.done():
                    await there
            finally:
                self._open.discard(onward)
                onward.close()
        except OSError:
            _reset(writer)
        finally:
            for task in (there, here):
                if task is not None:
                    task.cancel()
            self._open.discard(writer)
            writer.close()

    def close(self) -> None:
        """Give the port back."""
        self.refuse()
        self._bound.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)


@contextlib.contextmanager
def running_proxy(target_url: str) -> Iterator[FaultProxy]:
    """Run a proxy to this address, in a thread, while the context lasts."""
    loop = asyncio.new_event_loop()
    running: Future[None] = Future()
    loop.call_soon(running.set_result, None)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    running.result(timeout=10)
    proxy = FaultProxy(loop, int(target_url.rpartition(":")[2]))
    try:
        yield proxy
    finally:
        proxy.close()
        asyncio.run_coroutine_threadsafe(_all_ended(), loop).result(timeout=10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def unresponsive_port() -> Iterator[str]:
    """Give the address of a port where no connection is ever made, and none is refused."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):  # what the kernel keeps although nobody accepts
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def _forward_requests(
    reader: asyncio.StreamReader, onward: asyncio.StreamWriter, fault: Fault
) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            if not fault.blackhole:
                onward.write(piece)
                await onward.drain()


async def _forward_responses(
    answers: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
) -> None:
    """Carry what comes back, up to where the fault strikes."""
    limits = (fault.reset_after_bytes, fault.end_after_bytes, fault.stall_after_bytes)
    left = min((limit for limit in limits if limit is not None), default=None)
    size = fault.drip_bytes or _PIECE_BYTES
    with contextlib.suppress(OSError):
        while left != 0:
            piece = await answers.read(size if left is None else min(size, left))
            if not piece:
                break
            left = None if left is None else left - len(piece)
            if fault.drip_bytes:
                await asyncio.sleep(fault.drip_pause_s)
            writer.write(piece)
            await writer.drain()
        if left == 0 and fault.stall_after_bytes is not None:
            await asyncio.Event().wait()
        if left == 0 and fault.reset_after_bytes is not None:
            _reset(writer)
        elif writer.can_write_eof():
            writer.write_eof()


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset in place of an end."""
    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.transport.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
    writer.transport.abort()


async def _all_ended() -> None:
    """Wait for the tasks of this loop."""
    current = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not current]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
