"""Agents whose conversations grow: time to the first token, and what was read again.

`python -m bench.engine.agents` starts one server after another and lets two agents work with it.
The one of jundot/omlx#2662 has a system prompt of 1,200 tokens and twenty results of tools with
950 tokens each. The other one has tools and a system prompt of 6,000 tokens, and takes forty steps
to 30,000 tokens; then it goes on from its middle twice, one of its messages is edited, and its last
answer is written again. A server that is slower than the time of an agent takes fewer steps.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from rich.console import Console

from bench.engine.chat_turns import SENTENCE, Turn, ask
from bench.engine.conversation import interpreter, reused_share
from bench.engine.long_prompts import text_of
from bench.harness.contenders import OURS, PEERS, Contender
from bench.harness.servers import Server, running
from bench.harness.tables import MISSING, Grid, Target, provenance, targets, write_page
from bench.harness.venvs import PeerUnavailable
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results" / "agents.md"
TIME_S: Final = 300.0
REQUEST_TIMEOUT_S: Final = 600.0
SENTENCE_TOKENS: Final = 15
MOST_TOKENS_READ_AGAIN: Final = 2048
"""Of a conversation whose message was edited, beside what comes after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The sizes of an agent's work, in tokens."""

    name: str
    system_tokens: int
    result_tokens: int
    steps: int
    tools: int = 0


RESEARCHER: Final = Agent(name="researcher", system_tokens=1200, result_tokens=950, steps=20)
PROGRAMMER: Final = Agent(
    name="programmer", system_tokens=5200, result_tokens=540, steps=40, tools=8
)
"""Its tools are about 800 tokens of its system prompt."""


@dataclass(slots=True, kw_only=True)
class Session:
    """What one agent has asked a server, and how it was answered."""

    agent: Agent
    messages: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)
    after: dict[str, Turn] = field(default_factory=dict)
    """Turns that did not follow the last one: forks, an edited message, an answer again."""
    longest_pause_s: float = 0.0
    peak_bytes: int = 0

    async def step(
        self, client: httpx.AsyncClient, server: Server, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Turn, str]:
        """Ask for one answer, and watch its pauses and the memory of the server."""
        arrivals_s: list[float] = []
        tools = [_tool(number) for number in range(self.agent.tools)]
        turn, answer = await ask(
            client,
            server.model,
            messages,
            on_event=arrivals_s.append,
            extra={"tools": tools} if tools else None,
        )
        pauses_s = (later - earlier for earlier, later in pairwise(arrivals_s))
        self.longest_pause_s = max(self.longest_pause_s, *pauses_s, 0.0)
        self.peak_bytes = max(self.peak_bytes, server.resident_bytes())
        return turn, answer


def _tool(number: int) -> dict[str, Any]:
    description = f"Tool {number}. " + SENTENCE * 3
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": f"tool_{number}", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _result(agent: Agent, step: int) -> dict[str, str]:
    return {"role": "tool", "content": f"Result {step}. " + text_of(agent.result_tokens, str(step))}


async def work(server: Server, agent: Agent, *, seconds: float) -> Session:
    """Let an agent take its steps, until its time is over."""
    system = {"role": "system", "content": text_of(agent.system_tokens, agent.name)}
    session = Session(agent=agent, messages=[system, {"role": "user", "content": "Do the work."}])
    ends_s = time.perf_counter() + seconds
    async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_TIMEOUT_S) as client:
        lengths = []
        for number in range(agent.steps):
            if time.perf_counter() > ends_s:
                return session
            lengths.append(len(session.messages))
            turn, answer = await session.step(client, server, session.messages)
            session.turns.append(turn)
            session.messages.append({"role": "assistant", "content": answer})
            session.messages.append(_result(agent, number))
        if not agent.tools:
            return session
        last = session.messages[:-2]
        middle = session.messages[: lengths[agent.steps // 2]]
        edited = [*last[:-7], _result(agent, agent.steps), *last[-6:]]
        others = {
            "a fork from the middle": [*middle, {"role": "user", "content": "Try another way."}],
            "a second fork": [*middle, {"role": "user", "content": "Write a test first."}],
            "a message was edited": edited,
            "the last answer again": last,
        }
        for name, messages in others.items():
            session.after[name], _ = await session.step(client, server, messages)
    return session


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}"


def table(name: str, sessions: Mapping[str, Session]) -> Grid:
    """Return the times of one agent at all servers."""
    rows: list[tuple[str, ...]] = []

    def row(label: str, values: Sequence[str]) -> None:
        rows.append((label, *values))

    all_sessions = list(sessions.values())
    row("steps", [f"{len(one.turns)} of {one.agent.steps}" for one in all_sessions])
    row("tokens of the last prompt", [f"{one.turns[-1].prompt_tokens:,}" for one in all_sessions])
    row("first step: first token, ms", [_ms(one.turns[0].ttft_s) for one in all_sessions])
    later = [[turn.ttft_s for turn in one.turns[1:]] or [0.0] for one in all_sessions]
    row("later steps: median, ms", [_ms(median(times_s)) for times_s in later])
    row("... mean, ms", [_ms(sum(times_s) / len(times_s)) for times_s in later])
    row("... longest, ms", [_ms(max(times_s)) for times_s in later])
    shares = [reused_share([one.turns]) for one in all_sessions]
    row("earlier tokens found again", [MISSING if s is None else f"{s:.1%}" for s in shares])
    for what in dict.fromkeys(what for one in all_sessions for what in one.after):
        after = [one.after.get(what) for one in all_sessions]
        row(f"{what}: first token, ms", [MISSING if t is None else _ms(t.ttft_s) for t in after])
        row("... tokens read", [_read(turn) for turn in after])
    row("longest pause in an answer, ms", [_ms(one.longest_pause_s) for one in all_sessions])
    row("memory, MB", [f"{one.peak_bytes / 1e6:,.0f}" for one in all_sessions])
    return Grid(title=f"The {name}", columns=("", *sessions), rows=tuple(rows))


def _read(turn: Turn | None) -> str:
    if turn is None or turn.cached_tokens is None:
        return MISSING
    return f"{turn.prompt_tokens - turn.cached_tokens:,}"


def judge(found: Mapping[str, Mapping[str, Session]]) -> list[Target]:
    """Compare what was found again with 95%, and an edited message with its bound."""
    judged = []
    for agent, sessions in found.items():
        share = reused_share([sessions[OURS.name].turns]) or 0.0
        name = f"{agent}: earlier tokens found again"
        judged.append(Target(name=name, reached=share, bound=0.95, at_least=True))
    programmer = found[PROGRAMMER.name][OURS.name]
    edited = programmer.after.get("a message was edited")
    if edited is not None and edited.cached_tokens is not None:
        changed = 4 * PROGRAMMER.result_tokens + 3 * programmer.turns[-1].answer_tokens
        read = edited.prompt_tokens - edited.cached_tokens - changed
        name = "an edited message: tokens read beside what comes after it"
        bound = float(MOST_TOKENS_READ_AGAIN)
        judged.append(Target(name=name, reached=float(read), bound=bound, at_least=False))
    return judged


CONTENDERS: Final[Mapping[str, tuple[Contender, Mapping[str, str]]]] = {
    OURS.name: (OURS, {}),
    **{peer.name: (peer, {}) for peer in PEERS if not peer.mtp},
    "mlx-vlm+apc": (next(p for p in PEERS if p.name == "mlx-vlm"), {"APC_ENABLED": "1"}),
}


async def run(model: Path, names: Sequence[str], folder: Path, seconds: float) -> None:
    """Measure all contenders that can run, and write the page."""
    console = Console(highlight=False)
    found: dict[str, dict[str, Session]] = {RESEARCHER.name: {}, PROGRAMMER.name: {}}
    missing = []
    for name in names:
        contender, environment = CONTENDERS[name]
        python = interpreter(contender, folder)
        if python is None:
            missing.append(f"{name} (not installed)")
            continue
        for agent in (RESEARCHER, PROGRAMMER):
            console.print(f"{name}: {agent.name}")
            log = folder / f"{name}.{agent.name}.log"
            try:
                async with running(
                    contender, python=python, model=model, log=log, environment=environment
                ) as server:
                    session = await work(server, agent, seconds=seconds)
            except (PeerUnavailable, httpx.HTTPError) as error:
                missing.append(f"{name}, {agent.name} ({type(error).__name__})")
                continue
            if session.turns:
                found[agent.name][name] = session
    about = (
        f"{provenance()}. Each agent has {seconds:.0f} s at each server. A share is of all tokens "
        "of the step before, prompt and answer; only servers that report `cached_tokens` have one. "
        "`mlx-vlm+apc` runs with APC_ENABLED=1."
    )
    if missing:
        about += f" Not measured: {', '.join(missing)}."
    grids = [*(table(name, sessions) for name, sessions in found.items()), targets(judge(found))]
    for grid in grids:
        console.print(grid.to_table())
    write_page(RESULTS, "Agents whose conversations grow", about, *grids)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.agents", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of the model")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="names, with commas")
    parser.add_argument("--seconds", type=float, default=TIME_S, help="for each agent and server")
    parser.add_argument("--venvs", type=Path, default=Path("~/.cache/paceline-bench").expanduser())
    options = parser.parse_args(arguments)
    options.venvs.mkdir(parents=True, exist_ok=True)
    names = [OURS.name, *(name for name in options.only.split(",") if name != OURS.name)]
    asyncio.run(run(options.model, names, options.venvs, options.seconds))


if __name__ == "__main__":
    main()
