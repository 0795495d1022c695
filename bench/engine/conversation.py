"""Time to the first token by turn of chats that grow, for our worker and its peers.

`python -m bench.engine.conversation` starts one server after another, lets one chat, and then
several at once, grow by about 400 tokens a turn, and counts the tokens that a cache held. Then it
measures our worker beside long prompts, and after a restart (`long_prompts.py`). A peer
runs in its virtual environment of `python -m bench.engine`, or in ours if the versions agree.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import httpx
from rich.console import Console

from bench.engine import long_prompts
from bench.engine.chat_turns import ANSWER_TOKENS, SENTENCE, Turn, ask
from bench.harness.contenders import OURS, PEERS, Contender
from bench.harness.servers import Server, running
from bench.harness.tables import MISSING, Grid, Target, provenance, targets, write_page
from bench.harness.venvs import INSTALLED, PeerUnavailable
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results"
TURNS: Final = 10
CHATS: Final = (1, 4)
MANY_CHATS: Final = 16
"""Of our worker alone."""
TIMEOUT_S: Final = 600.0
QUESTION_SENTENCES: Final = 22
"""Together with an answer they are about 400 tokens of the demo model."""


async def grow_chat(client: httpx.AsyncClient, model: str, chat: int) -> list[Turn]:
    """Let one chat grow; return its turns."""
    messages: list[dict[str, str]] = []
    turns = []
    for number in range(TURNS):
        question = f"Part {number} of story {chat}. " + SENTENCE * QUESTION_SENTENCES + "Go on."
        messages.append({"role": "user", "content": question})
        turn, answer = await ask(client, model, messages)
        turns.append(turn)
        messages.append({"role": "assistant", "content": answer})
    return turns


async def measure(server: Server, chats_at_once: Sequence[int]) -> dict[int, list[list[Turn]]]:
    """Return the turns of every chat, by the number of chats at once."""
    results = {}
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        for count in chats_at_once:
            first = sum(other for other in chats_at_once if other < count)
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
    results = {name: chats for name, chats in results.items() if count in chats}
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
    for count in (*CHATS, MANY_CHATS):
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
                counts = (*CHATS, MANY_CHATS) if contender is OURS else CHATS
                results[contender.name] = await measure(server, counts)
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
    console.print("long prompts")
    found = await long_prompts.measure(model, Path(sys.executable), folder)
    (chat,) = results[OURS.name][1]
    judged = [
        *judge(results),
        long_prompts.last_turn_over_system(chat[-1:], found),
        *long_prompts.judge(found),
    ]
    grids = [
        *(ttft_table(results, count) for count in (*CHATS, MANY_CHATS)),
        long_prompts.table(found),
        targets(judged),
    ]
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
