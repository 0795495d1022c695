"""Prefix affinity over two gateways and two workers.

Run it by `python -m bench.fleet.shared_prefix`.

All processes are real: redis-server, two gateways, and two workers with the demo model. Each system
prompt of 4,000 tokens is sent once through one gateway, and once more through the other in another
order; the second request is measured. For round robin, a header pins every request to the next
worker, so that about half of the prompts reach the worker that has them cached. Blocks of both
rules alternate in one run.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, Final

import httpx

from bench.harness.chat import Turn, ask
from bench.harness.options import parser
from bench.harness.parts import (
    AS_ADMIN,
    fixed_port,
    gateway_part,
    running_parts,
    running_redis,
    wait_until_up,
    worker_part,
)
from bench.harness.tables import Grid, Target, report, targets
from tools.demo_model import held_out

_TOKENS: Final = 4000
_ANSWER_TOKENS: Final = 4
_BLOCKS: Final = 4
_TIMEOUT_S: Final = 120.0
# Twice the interval of synchronisation between gateways.
_SYNC_WAIT_S: Final = 1.0
_PIN_HEADER: Final = "x-bench-worker"
_MACS: Final = ("mac-0", "mac-1")

Client = httpx.AsyncClient


@dataclass
class Arm:
    """The requests under one rule."""

    name: str
    pins: Iterator[int] | None = None
    """The worker of each request under round robin, else None."""
    first: list[Turn] = field(default_factory=list)
    second: list[Turn] = field(default_factory=list)

    async def send(self, client: Client, messages: Sequence[Any]) -> Turn:
        headers = {} if self.pins is None else {_PIN_HEADER: str(next(self.pins))}
        return await ask(client, "default", messages, headers=headers, max_tokens=_ANSWER_TOKENS)

    @property
    def hit_rate(self) -> float:
        return mean(bool(turn.cached_tokens) for turn in self.second)

    @property
    def ttft_s(self) -> float:
        return mean(turn.ttft_s for turn in self.second)

    def row(self) -> tuple[object, ...]:
        first_s = mean(turn.ttft_s for turn in self.first)
        tokens = median(turn.prompt_tokens for turn in self.second)
        second_s = median(turn.ttft_s for turn in self.second)
        return (
            *(self.name, len(self.second), f"{tokens:.0f}", f"{1e3 * first_s:.0f}"),
            *(f"{self.hit_rate:.0%}", f"{1e3 * self.ttft_s:.0f}", f"{1e3 * second_s:.0f}"),
        )


@asynccontextmanager
async def _fleet() -> AsyncIterator[list[Client]]:
    """Start Redis, gateways and workers; yield a client for each gateway."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        home = Path(folder)
        ports = [fixed_port() for _ in _MACS]
        async with running_redis(home) as redis:
            gateways, workers = [], []
            for port, mac in zip(ports, _MACS, strict=True):
                own = {"STATE_DIR": str(home / mac), "REDIS_URL": redis.url}
                gateways.append(gateway_part(home, port, name=f"gateway-{mac}", **own))
                joins = ("--join", f"http://127.0.0.1:{port}", "--label", mac)
                state = {"PACELINE_STATE_DIR": str(home / f"{mac}-worker")}
                workers.append(
                    worker_part(
                        home, fixed_port(), *joins, worker_id=mac, name=mac, environment=state
                    )
                )
            async with running_parts(*gateways):
                for port in ports:
                    await wait_until_up(port)
                clients = [
                    Client(base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S)
                    for port in ports
                ]
                async with running_parts(*workers), clients[0], clients[1]:
                    for client in clients:
                        while len(await _workers(client)) < len(_MACS):
                            await asyncio.sleep(0.1)
                    yield clients


async def _workers(client: Client) -> list[Any]:
    return list((await client.get("/v1/status")).json()["pools"]["vlm"]["workers"])


async def _add_pin_routes(clients: Sequence[Client]) -> None:
    """Add routes by the pin header, and wait until both gateways use them."""
    path = "/admin/v1/policy"
    current = await clients[0].get(path, headers=AS_ADMIN)
    document = current.json()
    for n, mac in enumerate(_MACS):
        document["pools"][mac] = {"lanes": ["text-mtp"], "workers": {"labels": [mac]}}
        route = {"name": mac, "when": {"header": {_PIN_HEADER: str(n)}}, "to": [mac]}
        document["routes"].insert(0, route)
    note = {"if-match": current.headers["etag"], "x-paceline-note": "round robin", **AS_ADMIN}
    (await clients[0].put(path, json=document, headers=note)).raise_for_status()
    while (
        len({(await client.get(path, headers=AS_ADMIN)).headers["etag"] for client in clients}) > 1
    ):
        await asyncio.sleep(0.1)


async def measure(prompts: int) -> tuple[Arm, Arm]:
    """Send blocks of new prompts under both rules, alternating."""
    arms = Arm("paceline"), Arm("round robin", cycle(range(len(_MACS))))
    prompts_per_block = max(2, prompts // _BLOCKS)
    async with _fleet() as clients:
        await _add_pin_routes(clients)
        (warm_up,) = held_out.fact_prompts(1, 200, seed=1)
        for client, pin in product(clients, range(len(_MACS))):  # first requests are slower
            await Arm("", iter([pin])).send(client, warm_up.messages)
        for block in range(_BLOCKS):
            order = list(range(prompts_per_block))
            Random(block).shuffle(order)
            for index, arm in enumerate(arms if block % 2 == 0 else arms[::-1]):
                seed = 1000 + 10 * block + index
                drawn = held_out.fact_prompts(prompts_per_block + 1, _TOKENS, seed=seed)
                for n in range(prompts_per_block):
                    arm.first.append(await arm.send(clients[n % 2], drawn[n].messages))
                await asyncio.sleep(_SYNC_WAIT_S)
                for n in order:
                    messages = (drawn[n].messages[0], drawn[n + 1].messages[1])
                    arm.second.append(await arm.send(clients[(n + 1) % 2], messages))
    return arms


def main() -> None:
    made = parser("fleet.shared_prefix", __doc__, quick=False)
    made.add_argument("--prompts", type=int, default=48, help="for each of the two rules")
    affinity, round_robin = asyncio.run(measure(made.parse_args().prompts))
    hits = affinity.hit_rate / max(round_robin.hit_rate, 1e-9)
    ttft = affinity.ttft_s / round_robin.ttft_s
    columns = ("", "prompts", "tokens", "first: mean TTFT, ms", "cached", "second: mean TTFT, ms")
    title = "Two gateways, two workers, system prompts of 4,000 tokens sent twice"
    grid = Grid(title, (*columns, "... median"), (affinity.row(), round_robin.row()))
    judged = (
        Target("cached, over round robin", hits, 1.8, at_least=True),
        Target("second mean TTFT, over round robin", ttft, 0.5),
    )
    about = (__doc__ or "").strip()
    report("shared_prefix.md", "System prompts over two gateways", about, grid, targets(judged))


if __name__ == "__main__":
    main()
