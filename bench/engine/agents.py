"""Agents whose conversations grow: time to the first token, and what was read again.

`python -m bench.engine.agents` starts one server after another and lets two agents work with it.
The one of jundot/omlx#2662 has a system prompt of 1,200 tokens and twenty results of tools with
950 tokens each. The other one has tools and a system prompt of 6,000 tokens, and takes forty steps
to 30,000 tokens; then it goes on from its middle twice, one of its messages is edited, and its last
answer is written again. A server that is slower than the time of an agent takes fewer steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, NamedTuple

import httpx

from bench.harness.chat import SENTENCE, Turn, ask, reused_share, text_of, user
from bench.harness.contenders import OURS, PEERS
from bench.harness.options import parser
from bench.harness.servers import Contender, Server, running_engine
from bench.harness.tables import Grid, Target, cell, console, provenance, report, targets
from bench.harness.venvs import PeerUnavailable

_TIME_S: Final = 300.0
_TIMEOUT_S: Final = 600.0
_MOST_TOKENS_READ_AGAIN: Final = 2048.0
"""Of a conversation whose message was edited, beside what comes after it."""
_EDITED: Final = "a message was edited"


class Agent(NamedTuple):
    """The sizes of an agent's work, in tokens."""

    name: str
    system_tokens: int
    result_tokens: int
    steps: int
    tools: int = 0

    def result(self, step: int) -> dict[str, str]:
        text = f"Result {step}. " + text_of(self.result_tokens, str(step))
        return {"role": "tool", "content": text}


RESEARCHER: Final = Agent("researcher", system_tokens=1200, result_tokens=950, steps=20)
PROGRAMMER: Final = Agent("programmer", system_tokens=5200, result_tokens=540, steps=40, tools=8)
"""Its tools are about 800 tokens of its system prompt."""


@dataclass(slots=True)
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
    ) -> Turn:
        """Ask for one answer, and watch its pauses and the memory of the server."""
        arrivals_s: list[float] = []
        tools = [_tool(number) for number in range(self.agent.tools)]
        more: dict[str, Any] = {"tools": tools} if tools else {}
        turn = await ask(client, server.model, messages, on_text=arrivals_s.append, **more)
        pauses_s = (later - earlier for earlier, later in pairwise(arrivals_s))
        self.longest_pause_s = max(self.longest_pause_s, *pauses_s, 0.0)
        self.peak_bytes = max(self.peak_bytes, server.resident_bytes())
        return turn


def _tool(number: int) -> dict[str, Any]:
    description = f"Tool {number}. " + SENTENCE * 3
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": f"tool_{number}", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


async def work(server: Server, agent: Agent, *, seconds: float) -> Session:
    """Let an agent take its steps, until its time is over."""
    system = {"role": "system", "content": text_of(agent.system_tokens, agent.name)}
    session = Session(agent, [system, user("Do the work.")])
    ends_s = time.perf_counter() + seconds
    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S) as client:
        lengths = []
        for number in range(agent.steps):
            if time.perf_counter() > ends_s:
                return session
            lengths.append(len(session.messages))
            turn = await session.step(client, server, session.messages)
            session.turns.append(turn)
            session.messages.append({"role": "assistant", "content": turn.text})
            session.messages.append(agent.result(number))
        if not agent.tools:
            return session
        last = session.messages[:-2]
        middle = session.messages[: lengths[agent.steps // 2]]
        others = {
            "a fork from the middle": [*middle, user("Try another way.")],
            "a second fork": [*middle, user("Write a test first.")],
            _EDITED: [*last[:-7], agent.result(agent.steps), *last[-6:]],
            "the last answer again": last,
        }
        for name, messages in others.items():
            session.after[name] = await session.step(client, server, messages)
    return session


def table(name: str, sessions: Mapping[str, Session]) -> Grid:
    every = list(sessions.values())
    later = [[turn.ttft_s for turn in one.turns[1:]] or [0.0] for one in every]
    rows: dict[str, list[str]] = {
        "steps": [f"{len(one.turns)} of {one.agent.steps}" for one in every],
        "tokens of the last prompt": [f"{one.turns[-1].prompt_tokens:,}" for one in every],
        "first step: first token, ms": [_ms(one.turns[0].ttft_s) for one in every],
        "later steps: median, ms": [_ms(median(times_s)) for times_s in later],
        "... mean, ms": [_ms(mean(times_s)) for times_s in later],
        "... longest, ms": [_ms(max(times_s)) for times_s in later],
        "earlier tokens found again": [cell(reused_share([one.turns]), 1, ".1%") for one in every],
    }
    lines = list(rows.items())
    for what in dict.fromkeys(what for one in every for what in one.after):
        after = [one.after.get(what) for one in every]
        lines.append((f"{what}: first token, ms", [_ms(one and one.ttft_s) for one in after]))
        lines.append(("... tokens read", [cell(_read(one), 1, ",") for one in after]))
    lines.append(("longest pause in an answer, ms", [_ms(one.longest_pause_s) for one in every]))
    lines.append(("memory, MB", [f"{one.peak_bytes / 1e6:,.0f}" for one in every]))
    return Grid(f"The {name}", ("", *sessions), [(label, *values) for label, values in lines])


def _ms(seconds: float | None) -> str:
    return cell(seconds, 1000, ",.0f")


def _read(turn: Turn | None) -> int | None:
    if turn is None or turn.cached_tokens is None:
        return None
    return turn.prompt_tokens - turn.cached_tokens


def judge(found: Mapping[str, Mapping[str, Session]]) -> Iterator[Target]:
    """Compare what was found again with 95%, and an edited message with its bound."""
    for agent, sessions in found.items():
        share = reused_share([sessions[OURS.name].turns]) or 0.0
        yield Target(f"{agent}: earlier tokens found again", share, 0.95, at_least=True)
    programmer = found[PROGRAMMER.name][OURS.name]
    read = _read(programmer.after.get(_EDITED))
    if read is not None:
        changed = 4 * PROGRAMMER.result_tokens + 3 * programmer.turns[-1].answer_tokens
        name = "an edited message: tokens read beside what comes after it"
        yield Target(name, float(read - changed), _MOST_TOKENS_READ_AGAIN)


CONTENDERS: Final[Mapping[str, tuple[Contender, Mapping[str, str]]]] = {
    **{one.name: (one, {}) for one in (OURS, *PEERS) if one is OURS or not one.mtp},
    "mlx-vlm+apc": (PEERS[0], {"APC_ENABLED": "1"}),
}


async def run(model: Path, names: Sequence[str], folder: Path, seconds: float) -> None:
    found: dict[str, dict[str, Session]] = {RESEARCHER.name: {}, PROGRAMMER.name: {}}
    missing = []
    for name in names:
        contender, environment = CONTENDERS[name]
        for agent in (RESEARCHER, PROGRAMMER):
            console().print(f"{name}: {agent.name}")
            log = f"{name}.{agent.name}"
            try:
                async with running_engine(
                    contender, folder, model=model, log=log, environment=environment
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
    grids = [table(name, sessions) for name, sessions in found.items()]
    report("agents.md", "Agents whose conversations grow", about, *grids, targets(judge(found)))


if __name__ == "__main__":
    made = parser("engine.agents", __doc__, quick=False, model=True)
    made.add_argument("--only", default=",".join(CONTENDERS), help="names, with commas")
    made.add_argument("--seconds", type=float, default=_TIME_S, help="for each agent and server")
    options = made.parse_args()
    chosen = [OURS.name, *(name for name in options.only.split(",") if name != OURS.name)]
    asyncio.run(run(options.model, chosen, options.folder, options.seconds))
