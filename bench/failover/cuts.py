"""Connections cut at a chosen byte, between a gateway and a worker that lives on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.failover.streams import KINDS, Comparison, body_of
from tests.support.failover_fleet import CHAT, Answer, running_fleet
from tests.support.fault_proxy import Fault
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine
from workers.engine.types import EngineSettings

_TOKENS: Final = 40


@dataclass(slots=True, kw_only=True)
class Cuts:
    """What was seen."""

    compared: Comparison = field(default_factory=Comparison)
    reached: int = 0
    """Streams that had not ended before the byte at which they were to be cut."""


async def cut_streams(
    cuts: int, rng: random.Random, home: Path, advance: Callable[[], None]
) -> Cuts:
    """Cut the connection of a stream at a random byte of its answer, again and again."""
    seen = Cuts()
    engine = await asyncio.to_thread(
        Engine.start, EngineSettings(model=CHECKPOINT, served_name="demo")
    )
    try:
        async with running_fleet(engine, home) as fleet:
            bodies = {kind: body_of(kind, max_tokens=_TOKENS) for kind in KINDS}
            whole = {kind: (await fleet.ask(CHAT, body)).content for kind, body in bodies.items()}
            for number in range(cuts):
                kind = list(KINDS)[number // 2 % len(KINDS)]
                # The lines that tell tokens, which the client does not get, are some more bytes.
                at = rng.randrange(1, len(whole[kind]) * 21 // 20)
                fault, first = Fault(reset_after_bytes=at), "ab"[number % 2]
                response = await fleet.ask(CHAT, bodies[kind], fault, first=first)
                answer, expected = Answer().read(response.content), Answer().read(whole[kind])
                seen.compared.add(f"cut at byte {at}, {kind}", answer, expected)
                advance()
            seen.reached = fleet.faults
    finally:
        await asyncio.to_thread(engine.stop)
    return seen
