"""An engine that follows a script, for faults that a real engine does not produce on demand."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import SecretStr

from paceline.drain_rate import QueuePlace
from paceline.http import CHECK_S, Server
from paceline.protocol import LaneReport, Speculation
from workers.engine.decode.memory_pressure import MemoryReading
from workers.engine.prefix.transfer import PrefixOffer, PrefixQuery, TransferFailed
from workers.engine.text.tool_formats import FORMATS, ToolFormat
from workers.engine.types import (
    Delta,
    EngineState,
    Event,
    Finished,
    FinishReason,
    Generation,
    LaneName,
    ModelCard,
    Prompt,
    Usage,
)
from workers.server.app import create_app
from workers.server.runtime import Worker

CARD = ModelCard(
    model="scripted",
    lanes=(LaneName.TEXT_MTP, LaneName.VLM),
    context_tokens=4096,
    vision=True,
    parameters=0,
    weights_bytes=0,
    mtp=True,
    looks_up=False,
    mtp_unavailable_reason=None,
    draft_tokens_requested=2,
    draft_tokens_effective=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StubPrompts:
    """A chat template that only joins its arguments."""

    tool_format: ToolFormat | None = FORMATS["qwen3_coder"]
    reasoning_format: object = None

    def template_variables(self, given: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
        return {**given, "reasoning_effort": effort}

    def chat(self, messages: Any, tools: Any = None, template_kwargs: Any = None, **_: bool) -> str:
        return f"{messages} {tools} {template_kwargs}"

    def tokenize_completion(self, text: str, limit: int | None = None) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def count(self, prompt: Prompt) -> int:
        return len(prompt.tokens or prompt.text)

    def spell(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def shared_prefix(self, *_: Any) -> str:
        return ""

    def turn_end(self, *_: Any) -> int:
        return 0

    def continues(self, *_: Any) -> bool:
        return True


@dataclass
class ScriptedEngine:
    """An engine that runs `script` for every generation: yields, raises or waits."""

    script: Sequence[Event | Exception | asyncio.Event] = ()
    card: ModelCard = CARD
    prompts: Any = field(default_factory=StubPrompts)
    alive: bool = True
    place: QueuePlace | None = None
    kept: EngineState = field(default_factory=EngineState)
    generations: list[Generation] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: list[str | None] = field(default_factory=list)
    _open: int = 0

    async def check(self, generation: Generation) -> int:
        return len(generation.prompt.tokens or generation.prompt.text)

    async def generate(
        self, generation: Generation, prefix_sources: object = ()
    ) -> AsyncGenerator[Event, None]:
        self.generations.append(generation)
        self._open += 1
        self.started.set()
        self.all_closed.clear()
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    await asyncio.sleep(0)  # events of a real engine come one by one
                    yield step
        finally:
            self._open -= 1
            if not self._open:
                self.all_closed.set()

    def open(self, query: PrefixQuery) -> AbstractAsyncContextManager[PrefixOffer]:
        raise TransferFailed("absent")

    @property
    def ready(self) -> bool:
        return self.alive

    def lane_reports(self) -> tuple[LaneReport, ...]:
        return tuple(LaneReport(name=name) for name in self.card.lanes)

    def queue_place(self, generation: Generation) -> QueuePlace | None:
        return self.place

    def state(self) -> EngineState:
        return self.kept

    def memory_reading(self) -> MemoryReading:
        return MemoryReading()

    async def drop_prefixes(self, scope: str | None) -> None:
        self.dropped.append(scope)

    def stop(self) -> None:
        self.alive = False


def text_events(*texts: str, speculation: Speculation | None = None) -> list[Event]:
    """Return the events of a generation that yields these pieces and stops."""
    finished = Finished(
        reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=7, completion_tokens=len(texts), cached_tokens=3),
        speculation=speculation or Speculation(),
    )
    return [*(Delta(text=text) for text in texts), finished]


def make_worker(engine: Any, clock: Callable[[], float] = lambda: 1000.0) -> Worker:
    """Wrap a worker around an engine."""
    return Worker(
        worker_id="scripted-1",
        boot_id="b1",
        url="http://127.0.0.1:1",
        engine=engine,
        clock=clock,
        started_s=clock(),
    )


@asynccontextmanager
async def serve_worker(
    worker: Worker, token: str | None = None, check_s: float = CHECK_S
) -> AsyncIterator[str]:
    """Serve a worker at a real socket of this loop; yield its URL."""
    app = create_app(worker, SecretStr(token) if token else None)
    async with serve_app(app, check_s=check_s) as url:
        yield url


@asynccontextmanager
async def worker_client(
    engine: Any, token: str | None = None, **fields: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a worker around an engine at a real socket; yield a client of it."""
    async with (
        serve_worker(make_worker(engine), token) as url,
        httpx.AsyncClient(base_url=url, timeout=60, **fields) as client,
    ):
        yield client


@asynccontextmanager
async def serve_app(
    app: Any,
    port: int = 0,
    host: str = "127.0.0.1",
    check_s: float = CHECK_S,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Serve an ASGI application at a real socket of this loop; yield its URL."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    async with Server(app, check_s=check_s, tls=tls).on(listener):
        yield f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}"
