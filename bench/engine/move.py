"""Time to the first token of a chat that goes on at another worker, and the pauses of other rows.

`python -m bench.engine.move` starts two workers of one join token. The first turn of each chat runs
at one worker; the second turn runs there, at the other worker with the nodes of the first, and at
the other worker without them. Then both workers decode a long answer each while further chats move,
and the longest pause between two events of these answers is compared with that before.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from bench.harness.chat import SENTENCE, Turn, ask, user
from bench.harness.options import parser
from bench.harness.parts import JOIN_TOKEN, fixed_port, running_parts, wait_until_up, worker_part
from bench.harness.tables import Grid, Target, provenance, report, targets
from paceline.protocol import SCOPE_HEADER, SOURCES_HEADER
from workers.demo import CHECKPOINT
from workers.engine.types import EngineSettings

_SIZES: Final = (1000, 8000)
_SENTENCE_TOKENS: Final = 18
_TIMEOUT_S: Final = 600.0
_NO_END: Final = {"0": -100, "2": -100}
"""Biases by which the demo model ends no answer."""
_MAX_PAUSE: Final = 1.5

Client = httpx.AsyncClient


@dataclass(slots=True)
class Moves:
    """Times to the first token of the second turns of one size, in seconds."""

    stayed_s: list[float] = field(default_factory=list)
    moved_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    moved_tokens: list[int] = field(default_factory=list)
    differing: int = 0
    """Answers that differ between the three."""

    @property
    def ratio(self) -> float:
        """Return the times of moved chats over those of chats that are read again."""
        return median(m / c for m, c in zip(self.moved_s, self.cold_s, strict=True))

    def row(self) -> tuple[str, ...]:
        times_s = map(median, (self.stayed_s, self.moved_s, self.cold_s))
        return (
            f"{median(self.tokens):,.0f}",
            *(f"{time_s * 1000:,.0f}" for time_s in times_s),
            f"{self.ratio:.2f}",
            f"{sum(self.moved_tokens) / sum(self.tokens):.1%}",
            str(self.differing),
        )


async def ask_in(
    client: Client, messages: Sequence[dict[str, Any]], scope: str, source: Any = None
) -> Turn:
    """Return an answer in an isolation scope; `source` is a worker with so many tokens of it."""
    headers = {SCOPE_HEADER: scope, "x-paceline-lane": "text-mtp"}
    if source is not None:
        headers[SOURCES_HEADER] = json.dumps([{"url": source[0], "tokens": source[1]}])
    return await ask(client, "demo", messages, headers=headers, max_tokens=16)


async def begin_chat(
    holder: Client, size: int, name: str
) -> tuple[list[dict[str, Any]], tuple[str, int]]:
    """Let the first turn of a chat run; return the messages of the second, and its source."""
    text = f"Story {name}. " + SENTENCE * (size // _SENTENCE_TOKENS) + "Go on."
    first = await ask_in(holder, [user(text)], name)
    answer = {"role": "assistant", "content": first.text}
    source = str(holder.base_url).rstrip("/"), first.prompt_tokens + first.answer_tokens
    return [user(text), answer, user("And what happens next?")], source


async def move(holder: Client, taker: Client, size: int, chat: str, moves: Moves) -> None:
    messages, source = await begin_chat(holder, size, chat)
    moved = await ask_in(taker, messages, chat, source)
    stayed = await ask_in(holder, messages, chat)
    cold = await ask_in(taker, messages, f"cold {chat}")
    moves.moved_s.append(moved.ttft_s)
    moves.stayed_s.append(stayed.ttft_s)
    moves.cold_s.append(cold.ttft_s)
    moves.tokens.append(source[1])
    moves.moved_tokens.append(moved.cached_tokens or 0)
    moves.differing += len({moved.text, stayed.text, cold.text}) > 1


async def watch(client: Client, times_s: list[float]) -> None:
    """Let a worker decode a long answer; record the times of its events."""
    story = [user("Tell me a story.")]
    endless = {"max_tokens": 50_000, "logit_bias": _NO_END}
    headers = {"x-paceline-lane": "vlm"}
    await ask(client, "demo", story, on_text=times_s.append, headers=headers, **endless)


async def measure_pauses(
    holder: Client, taker: Client, count: int
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Move chats while both workers decode for somebody else.

    Yield each side with its median gap, and its longest ones while nothing else runs, chats go on
    at the holder, and at the taker.
    """
    chats = [await begin_chat(holder, _SIZES[-1], f"watched {n}") for n in range(count)]
    watched: dict[str, list[float]] = {"holder": [], "taker": []}
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(watch(client, watched[side]))
            for side, client in (("holder", holder), ("taker", taker))
        ]
        times_s = [time.perf_counter()]
        for _ in range(2):  # until both have begun, then for a while
            await asyncio.sleep(2.0)
            times_s.append(time.perf_counter())
        for number, (messages, _) in enumerate(chats):
            await ask_in(holder, messages, f"watched {number}")
        times_s.append(time.perf_counter())
        for number, (messages, source) in enumerate(chats):
            reply = await ask_in(taker, messages, f"watched {number}", source)
            if (reply.cached_tokens or 0) < source[1] - 2:
                raise SystemExit(f"a chat was read again: {reply.cached_tokens} of {source[1]}")
        times_s.append(time.perf_counter())
        for task in tasks:
            task.cancel()
    periods = list(pairwise(times_s))[1:]

    def gaps_s(events_s: list[float], begin_s: float, end_s: float) -> list[float]:
        return [b - a for a, b in pairwise(t for t in events_s if begin_s <= t <= end_s)]

    found = {
        side: [gaps_s(events_s, *period) for period in periods]
        for side, events_s in watched.items()
    }
    return ((side, (median(gaps[0]), *map(max, gaps))) for side, gaps in found.items())


async def run(repetitions: int) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        clients = []
        for name in ("holder", "taker"):
            port = fixed_port()
            part = worker_part(folder, port, name=name)
            await stack.enter_async_context(running_parts(part))
            await wait_until_up(port)
            headers = {"authorization": f"Bearer {JOIN_TOKEN}"}
            client = Client(
                base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=_TIMEOUT_S
            )
            clients.append(await stack.enter_async_context(client))
        holder, taker = clients
        results = {size: Moves() for size in _SIZES}
        for number in range(repetitions + 1):
            for size, moves in results.items():
                # The first round compiles kernels and measures the pace of reading.
                into = moves if number else Moves()
                await move(holder, taker, size, f"{size}-{number}", into)
        pauses = dict(await measure_pauses(holder, taker, repetitions))
    columns = (
        *("tokens", "same worker, ms", "moved, ms", "read again, ms", "moved / read again"),
        *("found again", "answers that differ"),
    )
    rows = [moves.row() for moves in results.values()]
    times = Grid("Time to first token of the second turn", columns, rows)
    gaps = Grid(
        "Gaps between the events of another answer, in ms",
        ("worker", "usual", "longest", "while chats stay", "while chats move"),
        [(side, *(f"{one * 1000:,.0f}" for one in gaps_s)) for side, gaps_s in pauses.items()],
    )
    chunk_s = EngineSettings(model=CHECKPOINT, served_name="").prefill_budget_s
    judged = [Target("moved / read again, 8k tokens", results[_SIZES[-1]].ratio, 0.3)]
    for side, (usual_s, *_, moved_s) in pauses.items():
        name = f"longest pause at the {side} / (1.5 gaps and a chunk)"
        judged.append(Target(name, moved_s / (_MAX_PAUSE * usual_s + chunk_s), 1.0))
    about = (
        f"{provenance()}. Two workers with the demo model on one machine; medians of {repetitions} "
        "chats. A chat's first turn runs at one worker, its second turn there, at the other worker "
        "with the nodes of the first, and at the other worker without them."
    )
    report("move.md", "Conversations that move", about, times, gaps, targets(judged))


if __name__ == "__main__":
    made = parser("engine.move", __doc__, quick=False)
    made.add_argument("--repetitions", type=int, default=5)
    asyncio.run(run(made.parse_args().repetitions))
