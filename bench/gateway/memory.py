"""Memory of the gateway over a million requests.

`python -m bench.gateway.memory` sends requests, streamed and not, through the gateway to a worker
with prepared answers, and samples the memory of its process. The gateway runs with a key and all
defaults (policy, accounting, metrics).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.progress import Progress

from bench.gateway.contenders import running_ours
from bench.gateway.load import Question, send_requests
from bench.harness.options import parser
from bench.harness.tables import Grid, Target, bar, console, provenance, report, targets
from gateway.event_loop import run

_QUICK_REQUESTS: Final = 1000
_POINTS: Final = 20
_CONCURRENCY: Final = 16
_KINDS: Final = (Question(stream=False), Question(stream=True))


async def measure(requests: int, folder: Path, progress: Progress) -> dict[int, int]:
    """Send requests, half of them streams; return the memory of the gateway by their number."""
    task = progress.add_task("requests", total=requests)
    resident = {}
    async with running_ours(folder) as gateway:
        sent = 0
        for point in range(1, _POINTS + 1):
            share = (requests * point // _POINTS - sent) // len(_KINDS)
            for question in _KINDS:
                without_end = float("inf")
                sizes = share, _CONCURRENCY, without_end
                sent += await send_requests(gateway.port, question, *sizes)
                progress.update(task, completed=sent)
            resident[sent] = gateway.resident_bytes()
    return resident


def main() -> None:
    made = parser("gateway.memory", __doc__)
    made.add_argument("--requests", type=int, default=1_000_000, help="half of them streams")
    options = made.parse_args()
    with Progress(console=console()) as progress:
        count = _QUICK_REQUESTS if options.quick else options.requests
        resident = run(measure(count, options.folder, progress))
    sizes = [*resident.values()]
    half = len(sizes) // 2
    grown = max(sizes[half:]) / max(sizes[:half])
    rows = [(bar(n, max(sizes)), f"{sent:,}", f"{n / 1e6:.1f}") for sent, n in resident.items()]
    judged = (
        Target("memory at the end, MB", sizes[-1] / 1e6, 120),
        Target("most memory of the second half over the first's", grown, 1.05),
    )
    about = (
        f"{provenance()}. {_CONCURRENCY} requests at a time, half of them streams, answers of 64 "
        "words."
    )
    grid = Grid("Memory of the gateway over its requests", ("process", "requests", "MB"), rows)
    title = "Memory of the gateway"
    report("gateway_memory.md", title, about, grid, targets(judged), write=not options.quick)


if __name__ == "__main__":
    main()
