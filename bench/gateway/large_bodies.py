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
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

from bench.attack.http_client import encode, send
from bench.attack.large_bodies import SHAPES
from bench.attack.neighbour import Wait, p99_ms
from bench.gateway import backend
from bench.gateway.contenders import KEY, OURS, running_backend, running_gateway
from bench.harness.options import parser
from bench.harness.processes import end, start
from bench.harness.tables import Grid, Target, provenance, report, targets

_LONGER_MS: Final = 50.0
_FIRST, _LAST = -15, 5


def _prefer(process_id: int, core: int) -> None:
    """Give all threads of a process a core, before the others there."""
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
        os.setpriority(os.PRIO_PROCESS, int(thread.name), _FIRST)


def _children() -> list[int]:
    own = os.getpid()
    return [*map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split())]


async def _measure(folder: Path, seconds: float) -> tuple[list[tuple[str, ...]], list[Target]]:
    os.sched_setaffinity(0, {1})
    os.setpriority(os.PRIO_PROCESS, 0, _LAST)
    waits: list[Wait] = []
    rows: list[tuple[str, ...]] = []
    judged: list[Target] = []
    async with running_backend() as worker_port, running_gateway(OURS, folder, worker_port) as ours:
        neighbour = (sys.executable, "-m", "bench.attack.neighbour", str(ours.port), backend.MODEL)
        chats = await start(*neighbour, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert chats.stdin is not None
        chats.stdin.write(f"{KEY}\n".encode())
        chats.stdin.close()
        for child in _children():
            _prefer(child, 0 if child == ours.process_id else 1)

        async def read() -> None:
            assert chats.stdout is not None
            async for line in chats.stdout:
                waits.append(Wait(*json.loads(line)))  # noqa: PERF401  # read meanwhile

        async def p99_since(since_s: float) -> float:
            until_s = time.monotonic()
            await asyncio.sleep(0.5)  # those that still wait count too
            return p99_ms([one for one in waits if since_s <= one.sent_s < until_s])

        reading = asyncio.create_task(read())
        try:
            await asyncio.sleep(2.0)
            begun_s = time.monotonic()
            await asyncio.sleep(seconds)
            alone_ms = await p99_since(begun_s)
            rows.append(("no other request", "", "", f"{alone_ms:.1f}"))
            for shape, (path, make) in SHAPES.items():
                fields = make() | {"model": backend.MODEL}
                body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
                raw, statuses = encode(body, path=path, key=KEY), Counter[int]()
                begun_s = time.monotonic()
                while time.monotonic() < begun_s + seconds:
                    statuses[(await send(ours.port, raw)).status] += 1
                beside_ms = await p99_since(begun_s)
                answers = ", ".join(f"{count} x {status}" for status, count in statuses.items())
                rows.append((shape, f"{len(body) / 1e6:.1f}", answers, f"{beside_ms:.1f}"))
                judged.append(Target(f"{shape}: longer, ms", beside_ms - alone_ms, _LONGER_MS))
            assert all(one.status == 200 for one in waits), "each small chat is answered"
        finally:
            reading.cancel()
            await end(chats)
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
