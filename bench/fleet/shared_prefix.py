"""System prompts found again over two gateways and two workers.

Run it by `python -m bench.fleet.shared_prefix`.

All is real: redis-server, two `paceline gateway`, two workers on the demo model. Each system prompt
of 4,000 tokens is asked once through one gateway and once more through the other, in another order;
the second time counts. Round robin is the same line with every request pinned by a header to the
worker whose turn it is, so that half of the prompts come back to the worker that had them, give or
take the order. Blocks with the one and the other follow each other in one run.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, Final, NamedTuple

import httpx
from rich.console import Console

from bench.harness.blas import preload
from bench.harness.tables import Grid
from tools.demo_model import held_out
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results" / "shared_prefix.md"
_ROOT: Final = Path(__file__).parents[2]
_TOKENS: Final = 4000
_ANSWER_TOKENS: Final = 4
_BLOCKS: Final = 4
_TOKEN: Final = "of-the-benchmark"
_PATIENCE_S: Final = 120.0
# Twice as long as gateways take to tell each other.
_TOLD_S: Final = 1.0
_FOLLOWED: Final = "paceline"
_IN_TURN: Final = "round robin"
_TURN_HEADER: Final = "x-bench-turn"
_WANTED_HITS: Final = 1.8
_WANTED_TTFT: Final = 0.5


class Asked(NamedTuple):
    """One request under a system prompt that was asked before."""

    first_token_s: float
    cached_tokens: int
    prompt_tokens: int


@dataclass
class Arm:
    """What came of the requests under one rule."""

    name: str
    turns: Iterator[int] | None = None
    """Whose turn it is, where workers take turns."""
    first: list[Asked] = field(default_factory=list)
    again: list[Asked] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Return the share of prompts that were found at the second time of asking."""
        return sum(one.cached_tokens > 0 for one in self.again) / len(self.again)

    @property
    def ttft_s(self) -> float:
        """Return the mean time to the first token at the second time of asking."""
        return mean(one.first_token_s for one in self.again)


@contextmanager
def _process(
    command: Sequence[str], says: str, environment: Mapping[str, str], log: Path
) -> Iterator[re.Match[str]]:
    """Run a program until the block ends; give the line in which it says that it is ready."""
    with (
        log.open("w") as written,
        subprocess.Popen(
            command, env=environment, stdout=written, stderr=written, cwd=log.parent
        ) as process,
    ):
        try:
            until_s = time.monotonic() + _PATIENCE_S
            while not (found := re.search(says, log.read_text())):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise SystemExit(f"{command[:3]} does not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield found
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _fleet() -> Iterator[list[httpx.Client]]:
    """Start Redis, gateways and workers; give a client for each gateway."""
    redis = shutil.which("redis-server")
    if redis is None:
        raise SystemExit("This needs redis-server (apt-get install redis-server).")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as home, ExitStack() as running:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        environment = {
            **preload(), "PATH": "/usr/bin:/bin", "HOME": home, "PYTHONPATH": str(_ROOT),
            "PACELINE_JOIN_TOKEN": _TOKEN, "PACELINE_REDIS_URL": f"redis://127.0.0.1:{port}/0",
        }  # fmt: skip

        def start(name: str, command: Sequence[str], says: str, **settings: str) -> str:
            (folder := Path(home) / name).mkdir()
            given = {**environment, "PACELINE_STATE_DIR": str(folder), **settings}
            log = folder / "log"
            return running.enter_context(_process(command, says, given, log))[1]

        start("redis", [redis, "--port", port, "--save", "", "--bind", "127.0.0.1"], "(Ready)")
        python = [sys.executable, "-m"]
        urls = [
            start(f"gateway-{n}", [*python, "gateway", "gateway", "--port", "0"],
                  r"listens on (http://\S+?)\.?\n")
            for n in range(2)
        ]  # fmt: skip
        for n, url in enumerate(urls):
            flags = ["--model", str(CHECKPOINT), "--port", "0", "--join", url, "--id", f"mac-{n}",
                     "--label", f"mac-{n}"]  # fmt: skip
            start(f"worker-{n}", [*python, "workers", *flags], "PACELINE_WORKER_READY (.*)")
        clients = [
            running.enter_context(httpx.Client(base_url=url, timeout=_PATIENCE_S)) for url in urls
        ]
        for client in clients:
            while len(client.get("/v1/status").json()["pools"]["vlm"]["workers"]) < 2:
                time.sleep(0.1)
        yield clients


def _ask(
    client: httpx.Client, messages: Sequence[Mapping[str, object]], turns: Iterator[int] | None
) -> Asked:
    headers = {} if turns is None else {_TURN_HEADER: str(next(turns))}
    body = {
        "model": "default", "messages": list(messages), "max_tokens": _ANSWER_TOKENS,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    first_s = 0.0
    usage: dict[str, Any] = {}
    sent_s = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if not answer.is_success:
            raise SystemExit(f"A request was refused: {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not first_s and any(one["delta"].get("content") for one in chunk["choices"]):
                first_s = time.perf_counter() - sent_s
            usage = chunk.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Asked(first_s or time.perf_counter() - sent_s, cached, usage["prompt_tokens"])


def _let_pin(clients: Sequence[httpx.Client]) -> None:
    """Let a header say which worker takes a request, and wait until both gateways obey it."""
    path = "/admin/v1/policy"
    now = clients[0].get(path)
    document = now.json()
    for n in range(len(clients)):
        name = f"mac-{n}"
        document["pools"][name] = {"lanes": ["text-mtp"], "workers": {"labels": [name]}}
        pinned = {"name": name, "when": {"header": {_TURN_HEADER: str(n)}}, "to": [name]}
        document["routes"].insert(0, pinned)
    headers = {"if-match": now.headers["etag"], "x-paceline-note": "to compare with round robin"}
    clients[0].put(path, json=document, headers=headers).raise_for_status()
    while len({client.get(path).headers["etag"] for client in clients}) > 1:
        time.sleep(0.1)


def measure(clients: Sequence[httpx.Client], prompts: int) -> tuple[Arm, Arm]:
    """Ask blocks of new prompts under the one and the other rule in turns."""
    arms = Arm(_FOLLOWED), Arm(_IN_TURN, cycle(range(len(clients))))
    each = max(2, prompts // _BLOCKS)
    _let_pin(clients)
    for client, turn in product(clients, range(2)):  # what a first request costs is nobody's
        _ask(client, held_out.fact_prompts(1, 200, seed=1)[0].messages, iter([turn]))
    for block in range(_BLOCKS):
        order = list(range(each))
        Random(block).shuffle(order)
        for which, arm in enumerate(arms if block % 2 == 0 else arms[::-1]):
            asked = held_out.fact_prompts(each + 1, _TOKENS, seed=1000 + 10 * block + which)
            questions = [prompt.messages[1] for prompt in asked]
            for n in range(each):
                arm.first.append(_ask(clients[n % 2], asked[n].messages, arm.turns))
            time.sleep(_TOLD_S)
            for n in order:
                messages = (asked[n].messages[0], questions[n + 1])
                arm.again.append(_ask(clients[(n + 1) % 2], messages, arm.turns))
    return arms


def _row(arm: Arm) -> tuple[str, ...]:
    first_s = mean(one.first_token_s for one in arm.first)
    tokens = median(one.prompt_tokens for one in arm.again)
    again_s = median(one.first_token_s for one in arm.again)
    return (
        arm.name, str(len(arm.again)), f"{tokens:.0f}", f"{1e3 * first_s:.0f}",
        f"{arm.hit_rate:.0%}", f"{1e3 * arm.ttft_s:.0f}", f"{1e3 * again_s:.0f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet.shared_prefix", description=__doc__
    )
    parser.add_argument("--prompts", type=int, default=48, help="for each of the two rules")
    options = parser.parse_args()
    with _fleet() as clients:
        followed, in_turn = measure(clients, options.prompts)
    hits = followed.hit_rate / max(in_turn.hit_rate, 1e-9)
    ttft = followed.ttft_s / in_turn.ttft_s
    grid = Grid(
        title="Two gateways, two workers, system prompts of 4,000 tokens asked twice",
        columns=("", "prompts", "tokens", "first time: mean TTFT, ms", "found again",
                 "again: mean TTFT, ms", "... median"),
        rows=(_row(followed), _row(in_turn)),
    )  # fmt: skip
    targets = Grid(
        title="Targets",
        columns=("", "reached", "wanted", "met"),
        rows=(
            ("found again, over round robin's", f"{hits:.2f}", f">= {_WANTED_HITS}",
             "yes" if hits >= _WANTED_HITS else "NO"),
            ("mean TTFT again, over round robin's", f"{ttft:.2f}",
             f"<= {_WANTED_TTFT}", "yes" if ttft <= _WANTED_TTFT else "NO"),
        ),
    )  # fmt: skip
    console = Console(highlight=False, width=110)
    console.print(grid.drawn())
    console.print(targets.drawn())
    about = f"# System prompts over two gateways\n\n{(__doc__ or '').strip()}\n"
    RESULTS.write_text(f"{about}\n{grid.markdown()}\n{targets.markdown()}")


if __name__ == "__main__":
    main()
