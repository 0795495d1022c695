"""Bare decode rounds and rollbacks, measured by `bench.engine.rounds` in a process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.blas import preload


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The mean over the rounds of one run in which all rows decoded."""

    rows: int
    k: int
    cost_s: float
    tokens_per_row: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The cost of a rollback of four rows after a verify."""

    context_tokens: int
    cost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """The rounds and rollbacks of all runs."""

    rounds: list[Round] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)


async def measure_bare(model: Path) -> Bare:
    """Run `bench.engine.rounds` with the BLAS of the servers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.engine.rounds", "--model", str(model)),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **preload()},
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"bench.engine.rounds ended with code {process.returncode}")
    result = json.loads(output.splitlines()[-1])
    return Bare(
        rounds=[Round(**entry) for entry in result["rounds"]],
        rollbacks=[Rollback(**entry) for entry in result["rollbacks"]],
    )
