"""Time to the first token by turn of chats that grow, for our worker and its peers.

`python -m bench.engine.conversation` starts one server after another, lets one chat, and then
several at once, grow by about 400 tokens a turn, and counts the tokens that a cache held. A peer
runs in its virtual environment of `python -m bench.engine`, or in ours if the versions agree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from rich.console import Console

from bench.harness.contenders import OURS, PEERS, Contender
from bench.harness.servers import Server, running
from bench.harness.tables import MISSING, Grid, Target, provenance, targets, write_page
from bench.harness.venvs import INSTALLED, PeerUnavailable
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results"
TURNS: Final = 10
ANSWER_TOKENS: Final = 48
CHATS: Final = (1, 4)
TIMEOUT_S: Final = 600.0
SENTENCE: Final = "The red fox sees the old tree and the blue boat finds the warm stone. "
QUESTION_SENTENCES: Final = 22
"""Together with an answer they are about 400 tokens of the demo model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of one chat."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None
    """None from a server that does not report them."""
    answer_tokens: int


async def grow_chat(client: httpx.AsyncClient, model: str, chat: int) -> list[Turn]:
    """Let one chat grow; return its turns."""
    messages: list[dict[str, str]] = []
    turns = []
    for number in range(TURNS):
        question = f"Part {number} of story {chat}. " + SENTENCE * QUESTION_SENTENCES + "Go on."
        messages.append({"role": "user", "content": question})
        turn, answer = await _ask(client, model, messages)
        turns.append(turn)
        messages.append({"role": "assistant", "content": answer})
    return turns


async def _ask(
    client: httpx.AsyncClient, model: str, messages: Sequence[dict[str, str]]
) -> tuple[Turn, str]:
    body = {
        "model": model, "messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage: dict[str, Any] = {}
    text, first_s = "", None
    started_s = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                piece = choice.get("delta", {}).get("content") or ""
                if piece and first_s is None:
                    first_s = time.perf_counter()
                text += piece
    details = usage.get("prompt_tokens_details") or {}
    turn = Turn(
        ttft_s=(first_s or time.perf_counter()) - started_s,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens"),
        answer_tokens=usage.get("completion_tokens", 0),
    )
    return turn, text


async def measure(server: Server) -> dict[int, list[list[Turn]]]:
    """Return the turns of every chat, by the number of chats at once."""
    results = {}
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        for count in CHATS:
            first = sum(CHATS[: CHATS.index(count)])
            chats = (grow_chat(client, server.model, first + chat) for chat in range(count))
            results[count] = await asyncio.gather(*chats)
    return results


def interpreter(contender: Contender, folder: Path) -> Path | None:
    """Return an interpreter that has the contender's packages, if there is one."""
    if contender.venv is None:
        return Path(sys.executable)
    for python in (folder / contender.venv.name / "bin" / "python", Path(sys.executable)):
        check = [str(python), "-c", INSTALLED, *contender.venv.pins]
        if (
            python.exists()
            and not subprocess.run(check, capture_output=True, check=False).returncode
        ):
            return python
    return None


def ttft_table(results: dict[str, dict[int, list[list[Turn]]]], count: int) -> Grid:
    """Return the median times of `count` chats at once, and what was found again."""
    at_once = "one chat" if count == 1 else f"{count} chats at once"
    rows = []
    for at in range(TURNS):
        times = [median(chat[at].ttft_s for chat in chats[count]) for chats in results.values()]
        rows.append((str(at + 1), *(f"{time_s * 1000:,.0f}" for time_s in times)))
    shares = [reused_share(chats[count]) for chats in results.values()]
    rows.append(("found again", *(MISSING if s is None else f"{s:.1%}" for s in shares)))
    title = f"Time to first token in ms, {at_once}"
    return Grid(title=title, columns=("turn", *results), rows=tuple(rows))


def reused_share(chats: Sequence[Sequence[Turn]]) -> float | None:
    """Return the share of the tokens of earlier turns, prompts and answers, found in a cache."""
    earlier = found = 0
    for chat in chats:
        for before, turn in pairwise(chat):
            if turn.cached_tokens is None:
                return None
            earlier += before.prompt_tokens + before.answer_tokens
            found += turn.cached_tokens
    return found / earlier if earlier else None


def judge(results: dict[str, dict[int, list[list[Turn]]]]) -> list[Target]:
    """Compare the last turn of one chat with the second, and with that of mlx-lm."""
    ours = results[OURS.name]
    (chat,) = ours[1]
    last_s = chat[-1].ttft_s
    found = [
        Target(name="turn 10 / turn 2", reached=last_s / chat[1].ttft_s, bound=2.2, at_least=False)
    ]
    for count in CHATS:
        name = f"earlier tokens found again, {count} at once"
        share = reused_share(ours[count]) or 0.0
        found.append(Target(name=name, reached=share, bound=0.95, at_least=True))
    if "mlx-lm" in results:
        (peer,) = results["mlx-lm"][1]
        reached = last_s / peer[-1].ttft_s
        found.append(Target(name="turn 10 / mlx-lm's", reached=reached, bound=0.6, at_least=False))
    return found


async def run(model: Path, peers: Sequence[str], folder: Path, console: Console) -> None:
    """Measure all contenders that can run, and write the page."""
    results: dict[str, dict[int, list[list[Turn]]]] = {}
    missing = []
    for contender in (OURS, *(peer for peer in PEERS if peer.name in peers)):
        python = interpreter(contender, folder)
        if python is None:
            missing.append(f"{contender.name} (not installed)")
            continue
        console.print(contender.name)
        log = folder / f"{contender.name}.conversation.log"
        try:
            async with running(contender, python=python, model=model, log=log) as server:
                results[contender.name] = await measure(server)
        except (PeerUnavailable, httpx.HTTPError) as error:
            missing.append(f"{contender.name} ({error})")
    about = (
        f"{provenance()}. Chats grow by about 400 tokens a turn; answers are greedy and have at "
        f"most {ANSWER_TOKENS} tokens. A share is of all tokens of the turn before, prompt and "
        "answer; only servers that report `cached_tokens` have one."
    )
    if missing:
        about += f" Not measured: {', '.join(missing)}."
    grids = [*(ttft_table(results, count) for count in CHATS), targets(judge(results))]
    for grid in grids:
        console.print(grid.to_table())
    write_page(RESULTS / "conversation.md", "Conversations that grow", about, *grids)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.conversation", description=__doc__
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of the model")
    parser.add_argument("--peers", default="mlx-lm,mlx-vlm", help="names of peers, with commas")
    parser.add_argument("--venvs", type=Path, default=Path("~/.cache/paceline-bench").expanduser())
    options = parser.parse_args(arguments)
    options.venvs.mkdir(parents=True, exist_ok=True)
    peers = [name for name in options.peers.split(",") if name]
    asyncio.run(run(options.model, peers, options.venvs, Console(highlight=False)))


if __name__ == "__main__":
    main()
