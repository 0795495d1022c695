"""A TCP proxy in this process that injects faults between a gateway and a worker."""

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tests.support.http_server import close_server

_PIECE_BYTES = 65536
RESET_AT_ONCE = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
_END_BYTES = 4096
_USAGE = re.compile(rb'"choices": ?\[\], ?"usage": ?\{[^\n]*\n\n')
"""The last event of a stream before `[DONE]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a connection; byte counts refer to the direction from the worker."""

    reset_at_connect: bool = False
    """Accept the connection and reset it."""
    blackhole: bool = False
    """Accept the connection and drop all bytes of the client."""
    reset_after_bytes: int | None = None
    """Reset the connection after this number of bytes, as when the worker is killed."""
    end_after_bytes: int | None = None
    """Close this direction after this number of bytes, as at the end of an answer."""
    stall_after_bytes: int | None = None
    """Stop forwarding after this number of bytes, with the connection open."""
    drip_bytes: int | None = None
    """Forward this number of bytes at a time, each after a pause."""
    drip_pause_s: float = 0.001


NO_FAULT = Fault()


class FaultProxy:
    """A port that forwards to another one. `fault` applies to new connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target_port: int) -> None:
        self.fault = NO_FAULT
        self.connections = 0
        """Number of connections so far."""
        self.faults = 0
        """Number of connections so far whose answer was cut: its cut came before the end of the
        event with its usage, after which nothing of a stream is left to lose."""
        self._loop = loop
        self.target_port = target_port
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._bound = _bound(0)
        """Bound also while the port refuses connections: then it does not listen."""
        self._address = self._bound.getsockname()
        self.listen()
        self.url = f"http://127.0.0.1:{self._address[1]}"

    @property
    def open_connections(self) -> int:
        return len(self._tasks)

    def listen(self) -> None:
        """Accept connections, on the same port after `refuse`."""
        self._run(self._listen())

    def refuse(self) -> None:
        """Close the port and reset open connections, as if the worker's process had ended."""
        self._run(self._close())

    def reset_all(self) -> None:
        """Reset every open connection and keep the port."""
        self._run(self._reset_all())

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._bound)

    async def _close(self) -> None:
        if self._server is not None:
            await close_server(self._server)
            self._server = None
            self._bound.close()
            self._bound = _bound(self._address[1])
        await self._reset_all()

    async def _reset_all(self) -> None:
        for writer in tuple(self._open):
            _reset(writer)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.fault.reset_at_connect or self._server is None:
            _reset(writer)
            return
        self._open.add(writer)
        forwarding = self._loop.create_task(self._forward(reader, writer, self.fault))
        self._tasks.add(forwarding)
        forwarding.add_done_callback(self._tasks.discard)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
    ) -> None:
        requests = responses = None
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(
                "127.0.0.1", self.target_port
            )
            self._open.add(upstream_writer)
            try:
                requests = asyncio.create_task(_forward_requests(reader, upstream_writer, fault))
                responses = asyncio.create_task(
                    self._forward_responses(upstream_reader, writer, fault)
                )
                # The end of either side ends the other; a half-closed side does not.
                await asyncio.wait((requests, responses), return_when=asyncio.FIRST_COMPLETED)
                if not requests.done():
                    await requests
            finally:
                self._open.discard(upstream_writer)
                upstream_writer.close()
        except OSError:
            _reset(writer)
        finally:
            for task in (requests, responses):
                if task is not None:
                    task.cancel()
            self._open.discard(writer)
            writer.close()

    async def _forward_responses(
        self, upstream_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
    ) -> None:
        """Forward bytes of the worker up to the fault."""
        limits = (fault.reset_after_bytes, fault.end_after_bytes, fault.stall_after_bytes)
        remaining = min((limit for limit in limits if limit is not None), default=None)
        size, end = fault.drip_bytes or _PIECE_BYTES, b""
        with contextlib.suppress(OSError):
            while remaining != 0:
                piece = await upstream_reader.read(
                    size if remaining is None else min(size, remaining)
                )
                if not piece:
                    break
                remaining = None if remaining is None else remaining - len(piece)
                end = (end + piece)[-_END_BYTES:]
                if fault.drip_bytes:
                    await asyncio.sleep(fault.drip_pause_s)
                writer.write(piece)
                await writer.drain()
            self.faults += remaining == 0 and not _USAGE.search(end)
            if remaining == 0 and fault.stall_after_bytes is not None:
                await asyncio.Event().wait()
            if remaining == 0 and fault.reset_after_bytes is not None:
                _reset(writer)
            elif writer.can_write_eof():
                writer.write_eof()

    def close(self) -> None:
        self.refuse()
        self._bound.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)


@contextlib.contextmanager
def running_proxy(target_url: str) -> Iterator[FaultProxy]:
    """Run a proxy to this address in a thread while the context lasts."""
    loop = asyncio.new_event_loop()
    started: Future[None] = Future()
    loop.call_soon(started.set_result, None)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    started.result(timeout=60)
    proxy = FaultProxy(loop, int(target_url.rpartition(":")[2]))
    try:
        yield proxy
    finally:
        proxy.close()
        asyncio.run_coroutine_threadsafe(_cancel_tasks(), loop).result(timeout=60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def unresponsive_port() -> Iterator[str]:
    """Yield the URL of a port that neither accepts nor refuses connections."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):  # the kernel queues some connections without an accept
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def _forward_requests(
    reader: asyncio.StreamReader, upstream_writer: asyncio.StreamWriter, fault: Fault
) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            if not fault.blackhole:
                upstream_writer.write(piece)
                await upstream_writer.drain()


def _bound(port: int) -> socket.socket:
    bound = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio lets small pieces wait
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.transport.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
    writer.transport.abort()


async def _cancel_tasks() -> None:
    current = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not current]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
