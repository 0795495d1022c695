"""How long a small request waits beside large bodies: `python -m bench.gateway.large_bodies`.

The bodies of `bench.attack` go to a gateway one after another, while another client sends a small
chat every 0.1 s. The worker has prepared answers, so only the gateway can make the chat wait. The
gateway has a core of its own; the clients and the worker share the other one, where the small
chats and the worker go first.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Final

from bench.attack.http_client import encode, send
from bench.attack.large_bodies import SHAPES
from bench.attack.neighbour import Neighbourhood, p99_ms
from bench.gateway import backend
from bench.gateway.contenders import KEY, OURS, running_backend, running_gateway
from bench.harness.options import parser
from bench.harness.processes import CORES, keep_to
from bench.harness.tables import Grid, Target, provenance, report, targets

_LONGER_MS: Final = 50.0
_FIRST, _LAST = -15, 5


async def _measure(folder: Path, seconds: float) -> tuple[list[tuple[str, ...]], list[Target]]:
    # What starts here runs on these cores, before this process.
    keep_to(CORES[1:])
    os.setpriority(os.PRIO_PROCESS, 0, _FIRST)
    watch = Neighbourhood({})
    judged: list[Target] = []
    async with running_backend() as worker_port, running_gateway(OURS, folder, worker_port) as ours:
        keep_to(CORES[:1], ours.process_id)
        async with watch.running(ours.port, KEY, seconds):
            os.setpriority(os.PRIO_PROCESS, 0, _LAST)
            rows: list[tuple[str, ...]] = [("no other request", "", "", f"{watch.alone_ms:.1f}")]
            for shape, (path, make) in SHAPES.items():
                fields = make() | {"model": backend.MODEL}
                body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
                raw, statuses = encode(body, path=path, key=KEY), Counter[int]()
                until_s = time.monotonic() + seconds
                async with watch.beside(shape, settle=False):
                    while time.monotonic() < until_s:
                        statuses[(await send(ours.port, raw)).status] += 1
                await asyncio.sleep(0.5)  # chats that still wait count too
                beside_ms = p99_ms(watch.waits_beside(shape))
                answers = ", ".join(f"{count} x {status}" for status, count in statuses.items())
                rows.append((shape, f"{len(body) / 1e6:.1f}", answers, f"{beside_ms:.1f}"))
                longer_ms = beside_ms - watch.alone_ms
                judged.append(Target(f"{shape}: longer, ms", longer_ms, _LONGER_MS))
            assert all(one.status == 200 for one in watch.waits), "each small chat is answered"
    return rows, judged


def main() -> None:
    made = parser("gateway.large_bodies", __doc__)
    options = made.parse_args()
    rows, judged = asyncio.run(_measure(options.folder, 1.0 if options.quick else 10.0))
    report(
        "large_bodies.md",
        "A small request beside large bodies",
        f"{provenance()}. `python -m bench.gateway.large_bodies`: a small chat every 0.1 s, beside "
        "one large body after another for 10 s of each shape, through one gateway on a core of its "
        "own to a worker with prepared answers.",
        Grid("99th percentile of the small chats", ("beside", "MB", "answers", "p99, ms"), rows),
        targets(judged),
        write=not options.quick,
    )


if __name__ == "__main__":
    main()
