"""What a long prompt costs others, and what a cache saves of one; for our worker alone.

Used by `bench.engine.conversation`. All answers are greedy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import httpx

from bench.engine.chat_turns import SENTENCE, Turn, ask
from bench.harness.contenders import OURS
from bench.harness.servers import Server, running
from bench.harness.tables import Grid, Target

REPEATS: Final = 5
SYSTEM_TOKENS: Final = 4000
RESTART_TOKENS: Final = 8000
LONG_TOKENS: Final = 16_000
SHORT: Final = "What is 2 + 2?"
SHORT_LIMIT_S: Final = 0.6
CHUNK_S: Final = 0.25
SENTENCE_TOKENS: Final = 15
QUESTION_SENTENCES: Final = 26
"""About the 400 tokens that a turn of a growing chat adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompts:
    """Times in seconds."""

    behind_system_s: float
    """First token of 400 tokens behind a kept system prompt of 4,000."""
    short_alone_s: float
    short_behind_s: float
    """First token of a short question that comes while a long prompt is read."""
    short_total_s: float
    long_alone_s: float
    long_with_short_s: float
    usual_gap_s: float
    longest_gap_s: float
    """Of a stream, while a long prompt is read."""
    cold_s: float
    restarted_s: float
    """First token of a prompt of 8,000 tokens after a restart of the worker."""


def text_of(tokens: int, name: str) -> str:
    """Return a text of about so many tokens, which begins like no other."""
    return f"Document {name}. " + SENTENCE * (tokens // SENTENCE_TOKENS)


async def measure(model: Path, python: Path, folder: Path) -> LongPrompts:
    """Start our worker twice, and measure."""
    ours = replace(OURS, arguments=(*OURS.arguments, "--prefix-cache-gb", "2"))
    start = partial(
        running,
        ours,
        python=python,
        model=model,
        log=folder / "long_prompts.log",
        environment={"PACELINE_STATE_DIR": str(folder / "long_prompts.state")},
    )
    document = text_of(RESTART_TOKENS, f"of a restart at {time.time()}")
    question = [{"role": "user", "content": f"{document} What is it about?"}]
    async with start() as server, _client(server) as one:
        await ask(one, server.model, [{"role": "user", "content": SHORT}])
        cold, _ = await ask(one, server.model, question)
        behind_s = await _behind_system(one, server.model)
        short_s, long_s = await _side_by_side(one, server.model)
        gaps_s = await _gaps(one, server.model)
    async with start() as server, _client(server) as one:
        await ask(one, server.model, [{"role": "user", "content": SHORT}])
        restarted, _ = await ask(one, server.model, question)
    return LongPrompts(
        behind_system_s=behind_s,
        short_alone_s=short_s[0].ttft_s,
        short_behind_s=short_s[1].ttft_s,
        short_total_s=short_s[1].total_s,
        long_alone_s=long_s[0].ttft_s,
        long_with_short_s=long_s[1].ttft_s,
        usual_gap_s=gaps_s[0],
        longest_gap_s=gaps_s[1],
        cold_s=cold.ttft_s,
        restarted_s=restarted.ttft_s,
    )


def _client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=600.0)


async def _behind_system(client: httpx.AsyncClient, model: str) -> float:
    system = {"role": "system", "content": text_of(SYSTEM_TOKENS, "of the system")}
    times_s = []
    for number in range(REPEATS + 1):
        content = f"Question {number}. " + SENTENCE * QUESTION_SENTENCES
        turn, _ = await ask(client, model, [system, {"role": "user", "content": content}])
        times_s.append(turn.ttft_s)
    return median(times_s[1:])


async def _side_by_side(
    client: httpx.AsyncClient, model: str
) -> tuple[tuple[Turn, Turn], tuple[Turn, Turn]]:
    """Return the turns of a short and of a long question, each alone and with the other."""
    short = [{"role": "user", "content": SHORT}]
    alone = [(await ask(client, model, short))[0] for _ in range(REPEATS)]
    shorts = sorted(alone, key=lambda turn: turn.ttft_s)
    long_alone, _ = await ask(client, model, _long("alone"))
    running_long = asyncio.create_task(ask(client, model, _long("beside")))
    await asyncio.sleep(long_alone.ttft_s / 3)
    behind, _ = await ask(client, model, short)
    long_beside, _ = await running_long
    return (shorts[REPEATS // 2], behind), (long_alone, long_beside)


def _long(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text_of(LONG_TOKENS, name)}]


async def _gaps(client: httpx.AsyncClient, model: str) -> tuple[float, float]:
    """Return the usual gap of a stream, and the longest one while a long prompt is read."""
    arrivals_s: list[float] = []
    story = [{"role": "user", "content": "Count from 1 to 400."}]
    options = {"max_tokens": 4000, "ignore_eos": True}
    stream = asyncio.create_task(
        ask(client, model, story, on_event=arrivals_s.append, extra=options)
    )
    await asyncio.sleep(3)
    before = len(arrivals_s)
    await ask(client, model, _long("of the gaps")[:1])
    after = len(arrivals_s)
    stream.cancel()
    usual = [later - earlier for earlier, later in pairwise(arrivals_s[1:before])]
    reading = [later - earlier for earlier, later in pairwise(arrivals_s[before - 1 : after])]
    return median(usual), max(reading)


def table(found: LongPrompts) -> Grid:
    """Return all times."""
    rows = (
        ("400 tokens behind a kept system prompt of 4,000: first token", found.behind_system_s),
        ("a short question alone: first token", found.short_alone_s),
        ("... while a prompt of 16,000 tokens is read", found.short_behind_s),
        ("a prompt of 16,000 tokens alone: first token", found.long_alone_s),
        ("... with the short question", found.long_with_short_s),
        ("a stream: usual gap", found.usual_gap_s),
        ("... longest gap while a prompt of 16,000 tokens is read", found.longest_gap_s),
        ("a prompt of 8,000 tokens: first token", found.cold_s),
        ("... after a restart of the worker", found.restarted_s),
    )
    return Grid(
        title="Long prompts, our worker",
        columns=("what", "ms"),
        rows=tuple((name, f"{value_s * 1000:,.0f}") for name, value_s in rows),
    )


def judge(found: LongPrompts) -> list[Target]:
    """Compare with the bounds."""

    def at_most(name: str, reached: float, bound: float) -> Target:
        return Target(name=name, reached=reached, bound=bound, at_least=False)

    short_bound_s = max(SHORT_LIMIT_S, CHUNK_S + 2 * found.short_alone_s)
    return [
        at_most("a short question behind 16k tokens over its bound",
                found.short_behind_s / short_bound_s, 1.0),
        at_most("16k tokens with a short question over alone and the short one",
                found.long_with_short_s / (found.long_alone_s + found.short_total_s), 1.1),
        at_most("longest gap over 1.5 usual ones and a chunk",
                found.longest_gap_s / (1.5 * found.usual_gap_s + CHUNK_S), 1.0),
        at_most("8k tokens after a restart over cold", found.restarted_s / found.cold_s, 0.25),
    ]  # fmt: skip


def last_turn_over_system(last: Sequence[Turn], found: LongPrompts) -> Target:
    """Compare the last turn of a chat with as many new tokens behind a kept system prompt."""
    reached = median(turn.ttft_s for turn in last) / found.behind_system_s
    name = "turn 10 / the same new tokens behind a kept 4k system prompt"
    return Target(name=name, reached=reached, bound=1.15, at_least=False)
