"""The price of failover while nobody dies: CPU time of our gateway per event of paced streams.

Two gateways take turns in front of the same worker. To one it tells its tokens, to the other not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Final

from bench.gateway import backend
from bench.gateway.contenders import OURS, running, running_backend
from bench.gateway.load import send_staggered
from bench.harness.process_cost import cpu_s

STREAMS: Final = 50
_ROUNDS: Final = 3


async def measure_price(turns: int, log_dir: Path, advance: Callable[[], None]) -> dict[str, float]:
    """Return the CPU seconds per event, the median over turns, without and with lines."""
    fingerprints = {"without lines": "", "with lines": "b0"}
    samples: dict[str, list[float]] = {name: [] for name in fingerprints}
    async with AsyncExitStack() as stack:
        worker_port = await stack.enter_async_context(running_backend())
        gateways = {}
        for name, fingerprint in fingerprints.items():
            started = running(OURS, venvs=log_dir, worker_port=worker_port, fingerprint=fingerprint)
            gateways[name] = await stack.enter_async_context(started)
        for turn in range(turns + 1):
            names = list(gateways)
            for name in names if turn % 2 else reversed(names):
                gateway = gateways[name]
                assert gateway.process_id is not None
                before_s = cpu_s(gateway.process_id)
                answers = await send_staggered(gateway.port, streams=STREAMS, rounds=_ROUNDS)
                used_s = cpu_s(gateway.process_id) - before_s
                if turn:  # the first one warms up
                    samples[name].append(used_s / len(answers) / backend.EVENTS)
            if turn:
                advance()
    return {name: median(values) for name, values in samples.items()}
