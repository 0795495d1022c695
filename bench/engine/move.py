"""Time to the first token of a chat that goes on at another worker, and the pauses of other rows.

`python -m bench.engine.move` starts two workers of one join token. The first turn of each chat runs
at one worker; the second turn runs there, at the other worker with the nodes of the first, and at
the other worker without them. Then both workers decode a long answer each while further chats move,
and the longest pause between two events of these answers is compared with that before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from rich.console import Console

from bench.engine.chat_turns import SENTENCE
from bench.harness.blas import preload
from bench.harness.processes import end, inherited, start
from bench.harness.tables import Grid, Target, provenance, targets, write_page
from paceline.protocol import READY_PREFIX, SCOPE_HEADER, SOURCES_HEADER
from workers.demo import CHECKPOINT
from workers.engine.types import EngineSettings

RESULTS: Final = Path(__file__).parents[1] / "results" / "move.md"
SIZES: Final = (1000, 8000)
TOKENS_PER_SENTENCE: Final = 18
TIMEOUT_S: Final = 600.0
_ROOT: Final = Path(__file__).parents[2]
_TOKEN: Final = "bench-join-token"
_START_S: Final = 300.0
_NO_END: Final = {"0": -100, "2": -100}
"""Biases by which the demo model ends no answer."""
_MAX_PAUSE: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer."""

    ttft_s: float
    text: str
    total_tokens: int
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class Moves:
    """Times to the first token of the second turns of one size, in seconds."""

    stayed_s: list[float] = field(default_factory=list)
    moved_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    moved_tokens: list[int] = field(default_factory=list)
    differing: int = 0
    """Answers that differ between the three."""


@dataclass(slots=True)
class Watched:
    """Times of the events of a long answer."""

    times_s: list[float] = field(default_factory=list)

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Return the times between the events of a period."""
        return [b - a for a, b in pairwise(t for t in self.times_s if begin_s <= t <= end_s)]


@asynccontextmanager
async def worker(folder: Path, name: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run a worker; yield a client for it."""
    environment = {
        **inherited(), **preload(), "PYTHONPATH": str(_ROOT), "HOME": str(folder),
        "PACELINE_JOIN_TOKEN": _TOKEN,
    }  # fmt: skip
    flags = ("--model", str(CHECKPOINT), "--port", "0", "--id", name)
    with (folder / f"{name}.log").open("wb") as log:
        process = await start(
            sys.executable, "-m", "workers", *flags,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
            env=environment,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            async with asyncio.timeout(_START_S):
                while not (line := await process.stdout.readline()).startswith(
                    READY_PREFIX.encode()
                ):
                    if not line:
                        raise SystemExit(f"worker {name} does not start")
            url = json.loads(line.removeprefix(READY_PREFIX.encode()))["url"]
            headers = {"authorization": f"Bearer {_TOKEN}"}
            async with httpx.AsyncClient(
                base_url=url, headers=headers, timeout=TIMEOUT_S
            ) as client:
                yield client
        finally:
            await end(process)


async def ask(
    client: httpx.AsyncClient,
    messages: Sequence[dict[str, str]],
    scope: str,
    source: tuple[str, int] | None = None,
) -> Reply:
    """Return a streamed answer, with its time to the first token."""
    body = {
        "model": "demo", "messages": messages, "temperature": 0, "max_tokens": 16,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {SCOPE_HEADER: scope, "x-paceline-lane": "text-mtp"}
    if source is not None:
        headers[SOURCES_HEADER] = json.dumps([{"url": source[0], "tokens": source[1]}])
    usage: dict[str, Any] = {}
    text, first_s = "", None
    started_s = time.perf_counter()
    async for event in events(client, body, headers):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            first_s = first_s or (time.perf_counter() if piece else None)
            text += piece
    return Reply(
        ttft_s=(first_s or time.perf_counter()) - started_s,
        text=text,
        total_tokens=usage["total_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


async def events(
    client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream."""
    request = client.stream("POST", "/v1/chat/completions", json=body, headers=headers)
    async with request as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def move(
    holder: httpx.AsyncClient, taker: httpx.AsyncClient, size: int, chat: str, moves: Moves
) -> None:
    """Let one chat go on at both workers."""
    sentences = size // TOKENS_PER_SENTENCE
    messages = [{"role": "user", "content": f"Story {chat}. " + SENTENCE * sentences + "Go on."}]
    first = await ask(holder, messages, chat)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And what happens next?"},
    ]
    source = (str(holder.base_url).rstrip("/"), first.total_tokens)
    moved = await ask(taker, messages, chat, source)
    stayed = await ask(holder, messages, chat)
    cold = await ask(taker, messages, f"cold {chat}")
    moves.moved_s.append(moved.ttft_s)
    moves.stayed_s.append(stayed.ttft_s)
    moves.cold_s.append(cold.ttft_s)
    moves.tokens.append(first.total_tokens)
    moves.moved_tokens.append(moved.cached_tokens)
    moves.differing += len({moved.text, stayed.text, cold.text}) > 1


async def watch(client: httpx.AsyncClient, watched: Watched) -> None:
    """Let a worker decode a long answer; record the times of its events."""
    body = {
        "model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 0, "max_tokens": 50_000, "logit_bias": _NO_END, "stream": True,
    }  # fmt: skip
    async for _ in events(client, body, {"x-paceline-lane": "vlm"}):
        watched.times_s.append(time.perf_counter())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Gaps between the events of another answer, in seconds."""

    side: str
    usual_s: float
    """Median gap while nothing moves."""
    quiet_s: float
    """Longest gap while nothing else runs."""
    stayed_s: float
    """Longest gap while chats go on at the holder."""
    moved_s: float
    """Longest gap while chats go on at the taker."""


async def measure_pauses(
    holder: httpx.AsyncClient, taker: httpx.AsyncClient, count: int
) -> list[Pauses]:
    """Move chats while both workers decode for somebody else."""
    chats = []
    for number in range(count):
        content = f"Long story {number}. " + SENTENCE * (SIZES[-1] // TOKENS_PER_SENTENCE)
        messages = [{"role": "user", "content": content}]
        first = await ask(holder, messages, f"watched {number}")
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And what happens next?"},
        ]
        chats.append((messages, first.total_tokens))
    watches = {"holder": Watched(), "taker": Watched()}
    url = str(holder.base_url).rstrip("/")
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(watch(client, watches[side]))
            for side, client in (("holder", holder), ("taker", taker))
        ]
        times_s = [time.perf_counter()]
        for _ in range(2):  # until both have begun, then for a while
            await asyncio.sleep(2.0)
            times_s.append(time.perf_counter())
        for number, (messages, _) in enumerate(chats):
            await ask(holder, messages, f"watched {number}")
        times_s.append(time.perf_counter())
        for number, (messages, tokens) in enumerate(chats):
            reply = await ask(taker, messages, f"watched {number}", (url, tokens))
            if reply.cached_tokens < tokens - 2:
                raise SystemExit(f"a chat was read again: {reply.cached_tokens} of {tokens} tokens")
        times_s.append(time.perf_counter())
        for task in tasks:
            task.cancel()
    periods = list(pairwise(times_s))[1:]
    pauses = []
    for side, watched in watches.items():
        quiet, stayed, moved = (watched.gaps_s(*period) for period in periods)
        pauses.append(
            Pauses(
                side=side,
                usual_s=median(quiet),
                quiet_s=max(quiet),
                stayed_s=max(stayed),
                moved_s=max(moved),
            )
        )
    return pauses


async def run(repetitions: int, console: Console) -> None:
    """Measure, and write the page."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        holder, taker = [
            await stack.enter_async_context(worker(folder, name)) for name in ("holder", "taker")
        ]
        results = {size: Moves() for size in SIZES}
        for number in range(repetitions + 1):
            for size, moves in results.items():
                # The first round compiles kernels and measures the pace of reading.
                into = moves if number else Moves()
                await move(holder, taker, size, f"{size}-{number}", into)
        pauses = await measure_pauses(holder, taker, repetitions)
    rows = [
        (
            f"{median(moves.tokens):,.0f}",
            *(
                f"{median(times_s) * 1000:,.0f}"
                for times_s in (moves.stayed_s, moves.moved_s, moves.cold_s)
            ),
            f"{ratio(moves):.2f}",
            f"{sum(moves.moved_tokens) / sum(moves.tokens):.1%}",
            str(moves.differing),
        )
        for moves in results.values()
    ]
    columns = (
        *("tokens", "same worker, ms", "moved, ms", "read again, ms", "moved / read again"),
        *("found again", "answers that differ"),
    )
    times = Grid(title="Time to first token of the second turn", columns=columns, rows=tuple(rows))
    pause_rows = []
    for one in pauses:
        gaps_s = (one.usual_s, one.quiet_s, one.stayed_s, one.moved_s)
        pause_rows.append((one.side, *(f"{gap_s * 1000:,.0f}" for gap_s in gaps_s)))
    gaps = Grid(
        title="Gaps between the events of another answer, in ms",
        columns=("worker", "usual", "longest", "while chats stay", "while chats move"),
        rows=tuple(pause_rows),
    )
    chunk_s = EngineSettings(model=CHECKPOINT, served_name="").prefill_budget_s
    found = [
        Target(
            name="moved / read again, 8k tokens",
            reached=ratio(results[SIZES[-1]]),
            bound=0.3,
            at_least=False,
        ),
        *(
            Target(
                name=f"longest pause at the {one.side} / (1.5 gaps and a chunk)",
                reached=one.moved_s / (_MAX_PAUSE * one.usual_s + chunk_s),
                bound=1.0,
                at_least=False,
            )
            for one in pauses
        ),
    ]
    about = (
        f"{provenance()}. Two workers with the demo model on one machine; medians of {repetitions} "
        "chats. A chat's first turn runs at one worker, its second turn there, at the other worker "
        "with the nodes of the first, and at the other worker without them."
    )
    for grid in (times, gaps, targets(found)):
        console.print(grid.to_table())
    write_page(RESULTS, "Conversations that move", about, times, gaps, targets(found))


def ratio(moves: Moves) -> float:
    """Return the time to the first token of moved chats, in those of chats that are read again."""
    return median(m / c for m, c in zip(moves.moved_s, moves.cold_s, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.move", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    asyncio.run(run(options.repetitions, Console(highlight=False)))


if __name__ == "__main__":
    main()
