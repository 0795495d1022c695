"""Time to the first token by turn of chats that grow, for our worker and its peers.

`python -m bench.engine.conversation` starts one server after another, lets one chat, and then
several at once, grow by about 400 tokens a turn, and counts the tokens that a cache held. Then it
measures our worker beside long prompts, and after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from bench.harness.chat import ANSWER_TOKENS, SENTENCE, Turn, ask, reused_share, text_of, user
from bench.harness.contenders import OURS, PEERS
from bench.harness.options import parser, peers_option
from bench.harness.servers import Server, running_engine
from bench.harness.tables import Grid, Target, cell, console, provenance, report, targets
from bench.harness.venvs import PeerUnavailable

_TURNS: Final = 10
_CHATS: Final = (1, 4)
_MANY_CHATS: Final = 16
"""Of our worker alone."""
_TIMEOUT_S: Final = 600.0
_QUESTION_SENTENCES: Final = 22
"""Together with an answer they are about 400 tokens of the demo model."""
_ADDED_SENTENCES: Final = 26
"""About the 400 tokens that a turn of a growing chat adds."""
_REPEATS: Final = 5
_SYSTEM_TOKENS, _RESTART_TOKENS, _LONG_TOKENS = 4000, 8000, 16_000
_SHORT: Final = [user("What is 2 + 2?")]
_SHORT_LIMIT_S: Final = 0.6
_CHUNK_S: Final = 0.25

Chats = dict[int, list[list[Turn]]]
"""The turns of every chat, by the number of chats at once."""
Ask = Callable[..., Any]


async def grow_chat(ask_server: Ask, chat: int) -> list[Turn]:
    messages, turns = [], []
    for number in range(_TURNS):
        text = f"Part {number} of story {chat}. " + SENTENCE * _QUESTION_SENTENCES + "Go on."
        messages.append(user(text))
        turns.append(await ask_server(messages))
        messages.append({"role": "assistant", "content": turns[-1].text})
    return turns


async def measure(server: Server, chats_at_once: Sequence[int]) -> Chats:
    results = {}
    async with _client(server) as client:
        ask_server = partial(ask, client, server.model)
        for count in chats_at_once:
            first = sum(other for other in chats_at_once if other < count)
            chats = (grow_chat(ask_server, first + chat) for chat in range(count))
            results[count] = await asyncio.gather(*chats)
    return results


def _client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S)


def ttft_table(results: dict[str, Chats], count: int) -> Grid:
    """Return the median times of `count` chats at once, and what was found again."""
    at_once = "one chat" if count == 1 else f"{count} chats at once"
    by_name = {name: chats[count] for name, chats in results.items() if count in chats}
    rows = []
    for at in range(_TURNS):
        times_s = [median(chat[at].ttft_s for chat in chats) for chats in by_name.values()]
        rows.append((str(at + 1), *(f"{time_s * 1000:,.0f}" for time_s in times_s)))
    shares = (cell(reused_share(chats), 1, ".1%") for chats in by_name.values())
    rows.append(("found again", *shares))
    return Grid(f"Time to first token in ms, {at_once}", ("turn", *by_name), rows)


def judge_turns(results: dict[str, Chats]) -> Iterator[Target]:
    """Compare the last turn of one chat with the second, and with that of mlx-lm."""
    ours = results[OURS.name]
    (chat,) = ours[1]
    last_s = chat[-1].ttft_s
    yield Target("turn 10 / turn 2", last_s / chat[1].ttft_s, 2.2)
    for count in (*_CHATS, _MANY_CHATS):
        share = reused_share(ours[count]) or 0.0
        yield Target(f"earlier tokens found again, {count} at once", share, 0.95, at_least=True)
    if "mlx-lm" in results:
        (peer,) = results["mlx-lm"][1]
        yield Target("turn 10 / mlx-lm's", last_s / peer[-1].ttft_s, 0.6)


async def long_prompts(model: Path, folder: Path, last_s: float) -> tuple[Grid, list[Target]]:
    """Measure what a long prompt costs others, and what a cache saves of one, at our worker.

    `last_s` is the time to the first token of the last turn of a chat.
    """
    start: Callable[[], AbstractAsyncContextManager[Server]] = partial(
        running_engine,
        replace(OURS, command=f"{OURS.command} --prefix-cache-gb 2"),
        folder,
        model=model,
        log="long_prompts",
        environment={"PACELINE_STATE_DIR": str(folder / "long_prompts.state")},
    )
    document = text_of(_RESTART_TOKENS, f"of a restart at {time.time()}")
    question = [user(f"{document} What is it about?")]
    async with start() as server, _client(server) as client:
        one = partial(ask, client, server.model)
        await one(_SHORT)
        cold_s = (await one(question)).ttft_s
        behind_s = await _behind_system(one)
        short, behind, long_alone_s, long_beside_s = await _side_by_side(one)
        usual_s, longest_s = await _gaps(one)
    async with start() as server, _client(server) as client:
        one = partial(ask, client, server.model)
        await one(_SHORT)
        restarted_s = (await one(question)).ttft_s
    rows = {
        "400 tokens behind a kept system prompt of 4,000: first token": behind_s,
        "a short question alone: first token": short.ttft_s,
        "... while a prompt of 16,000 tokens is read": behind.ttft_s,
        "a prompt of 16,000 tokens alone: first token": long_alone_s,
        "... with the short question": long_beside_s,
        "a stream: usual gap": usual_s,
        "... longest gap while a prompt of 16,000 tokens is read": longest_s,
        "a prompt of 8,000 tokens: first token": cold_s,
        "... after a restart of the worker": restarted_s,
    }
    bound_s = max(_SHORT_LIMIT_S, _CHUNK_S + 2 * short.ttft_s)
    together = long_beside_s / (long_alone_s + behind.total_s)
    judged = [
        Target("turn 10 / the same new tokens behind a kept 4k system prompt", last_s / behind_s,
               1.15),
        Target("a short question behind 16k tokens over its bound", behind.ttft_s / bound_s, 1.0),
        Target("16k tokens with a short question over alone and the short one", together, 1.1),
        Target("longest gap over 1.5 usual ones and a chunk",
               longest_s / (1.5 * usual_s + _CHUNK_S), 1.0),
        Target("8k tokens after a restart over cold", restarted_s / cold_s, 0.25),
    ]  # fmt: skip
    times = [(name, f"{value_s * 1000:,.0f}") for name, value_s in rows.items()]
    return Grid("Long prompts, our worker", ("what", "ms"), times), judged


async def _behind_system(one: Ask) -> float:
    system = {"role": "system", "content": text_of(_SYSTEM_TOKENS, "of the system")}
    times_s = []
    for number in range(_REPEATS + 1):
        content = f"Question {number}. " + SENTENCE * _ADDED_SENTENCES
        times_s.append((await one([system, user(content)])).ttft_s)
    return median(times_s[1:])


async def _side_by_side(one: Ask) -> tuple[Turn, Turn, float, float]:
    """Return a short question alone and behind a long one, and the times of the long one."""
    alone = sorted([await one(_SHORT) for _ in range(_REPEATS)], key=lambda turn: turn.ttft_s)
    long_alone_s = (await one(_long("alone"))).ttft_s
    running_long = asyncio.create_task(one(_long("beside")))
    await asyncio.sleep(long_alone_s / 3)
    behind = await one(_SHORT)
    return alone[_REPEATS // 2], behind, long_alone_s, (await running_long).ttft_s


def _long(name: str) -> list[dict[str, Any]]:
    return [user(text_of(_LONG_TOKENS, name))]


async def _gaps(one: Ask) -> tuple[float, float]:
    """Return the usual gap of a stream, and the longest one while a long prompt is read."""
    arrivals_s: list[float] = []
    story = [user("Count from 1 to 400.")]
    endless = one(story, on_text=arrivals_s.append, max_tokens=4000, ignore_eos=True)
    stream = asyncio.create_task(endless)
    await asyncio.sleep(3)
    before = len(arrivals_s)
    await one(_long("of the gaps"))
    after = len(arrivals_s)
    stream.cancel()
    usual = [later - earlier for earlier, later in pairwise(arrivals_s[1:before])]
    reading = [later - earlier for earlier, later in pairwise(arrivals_s[before - 1 : after])]
    return median(usual), max(reading)


async def run(model: Path, peers: Sequence[str], folder: Path) -> None:
    results: dict[str, Chats] = {}
    missing = []
    counts = (*_CHATS, _MANY_CHATS)
    for contender in (OURS, *(peer for peer in PEERS if peer.name in peers)):
        console().print(contender.name)
        log = f"{contender.name}.conversation"
        try:
            async with running_engine(contender, folder, model=model, log=log) as server:
                chats = await measure(server, counts if contender is OURS else _CHATS)
                results[contender.name] = chats
        except (PeerUnavailable, httpx.HTTPError) as error:
            missing.append(f"{contender.name} ({error})")
    about = (
        f"{provenance()}. Chats grow by about 400 tokens a turn; answers are greedy and have at "
        f"most {ANSWER_TOKENS} tokens. A share is of all tokens of the turn before, prompt and "
        "answer; only servers that report `cached_tokens` have one. Our prefix cache has its "
        "default limit: a quarter of the memory beside the weights."
    )
    if missing:
        about += f" Not measured: {', '.join(missing)}."
    console().print("long prompts")
    last_s = results[OURS.name][1][0][-1].ttft_s
    grid, judged = await long_prompts(model, folder, last_s)
    grids = [*(ttft_table(results, count) for count in counts), grid]
    judged = [*judge_turns(results), *judged]
    report("conversation.md", "Conversations that grow", about, *grids, targets(judged))


if __name__ == "__main__":
    made = parser("engine.conversation", __doc__, quick=False, model=True)
    peers_option(made, ["mlx-lm", "mlx-vlm", "vllm-mlx"])
    made.set_defaults(peers=["mlx-lm", "mlx-vlm"])
    options = made.parse_args()
    asyncio.run(run(options.model, options.peers, options.folder))
