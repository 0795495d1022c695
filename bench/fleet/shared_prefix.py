"""Prefix affinity over two gateways and two workers.

Run it by `python -m bench.fleet.shared_prefix`.

All processes are real: redis-server, two gateways, and two workers with the demo model. Each system
prompt of 4,000 tokens is sent once through one gateway, and once more through the other in another
order; the second request is measured. For round robin, a header pins every request to the next
worker, so that about half of the prompts reach the worker that has them cached. Blocks of both
rules alternate in one run.
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
from bench.harness.processes import exit_at_sigterm
from bench.harness.tables import Grid
from tools.demo_model import held_out
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results" / "shared_prefix.md"
_ROOT: Final = Path(__file__).parents[2]
_TOKENS: Final = 4000
_ANSWER_TOKENS: Final = 4
_BLOCKS: Final = 4
_TOKEN: Final = "bench-join-token"
_ADMIN_KEY: Final = "bench-admin-key"
_TIMEOUT_S: Final = 120.0
# Twice the interval of synchronisation between gateways.
_SYNC_WAIT_S: Final = 1.0
_AFFINITY: Final = "paceline"
_ROUND_ROBIN: Final = "round robin"
_PIN_HEADER: Final = "x-bench-worker"
_TARGET_HITS: Final = 1.8
_TARGET_TTFT: Final = 0.5


class TimedRequest(NamedTuple):
    """A request and its time to first token."""

    first_token_s: float
    cached_tokens: int
    prompt_tokens: int


@dataclass
class Arm:
    """The requests under one rule."""

    name: str
    pins: Iterator[int] | None = None
    """The worker of each request under round robin, else None."""
    first: list[TimedRequest] = field(default_factory=list)
    second: list[TimedRequest] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Return the share of second requests with a cached prompt."""
        return sum(request.cached_tokens > 0 for request in self.second) / len(self.second)

    @property
    def ttft_s(self) -> float:
        """Return the mean time to first token of second requests."""
        return mean(request.first_token_s for request in self.second)


@contextmanager
def _process(
    command: Sequence[str], ready_pattern: str, environment: Mapping[str, str], log: Path
) -> Iterator[re.Match[str]]:
    """Run a program until the block ends; yield the match of its line of readiness."""
    exit_at_sigterm()
    with (
        log.open("w") as written,
        subprocess.Popen(
            command, env=environment, stdout=written, stderr=written, cwd=log.parent
        ) as process,
    ):
        try:
            until_s = time.monotonic() + _TIMEOUT_S
            while not (match := re.search(ready_pattern, log.read_text())):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise SystemExit(f"{command[:3]} does not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield match
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _fleet() -> Iterator[list[httpx.Client]]:
    """Start Redis, gateways and workers; yield a client for each gateway."""
    redis = shutil.which("redis-server")
    if redis is None:
        raise SystemExit("This needs redis-server (apt-get install redis-server).")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as home, ExitStack() as running:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        environment = {
            **preload(), "PATH": "/usr/bin:/bin", "HOME": home, "PYTHONPATH": str(_ROOT),
            "PACELINE_JOIN_TOKEN": _TOKEN, "PACELINE_ADMIN_KEY": _ADMIN_KEY,
            "PACELINE_REDIS_URL": f"redis://127.0.0.1:{port}/0",
        }  # fmt: skip

        def start(name: str, command: Sequence[str], ready_pattern: str, **settings: str) -> str:
            (folder := Path(home) / name).mkdir()
            process_environment = {**environment, "PACELINE_STATE_DIR": str(folder), **settings}
            log = folder / "log"
            return running.enter_context(
                _process(command, ready_pattern, process_environment, log)
            )[1]

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
            running.enter_context(httpx.Client(base_url=url, timeout=_TIMEOUT_S)) for url in urls
        ]
        for client in clients:
            while len(client.get("/v1/status").json()["pools"]["vlm"]["workers"]) < 2:
                time.sleep(0.1)
        yield clients


def _send(
    client: httpx.Client, messages: Sequence[Mapping[str, object]], pins: Iterator[int] | None
) -> TimedRequest:
    headers = {} if pins is None else {_PIN_HEADER: str(next(pins))}
    body = {
        "model": "default", "messages": list(messages), "max_tokens": _ANSWER_TOKENS,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    first_s = 0.0
    usage: dict[str, Any] = {}
    sent_s = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if not response.is_success:
            raise SystemExit(f"A request was rejected: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not first_s and any(request["delta"].get("content") for request in chunk["choices"]):
                first_s = time.perf_counter() - sent_s
            usage = chunk.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return TimedRequest(first_s or time.perf_counter() - sent_s, cached, usage["prompt_tokens"])


def _add_pin_routes(clients: Sequence[httpx.Client]) -> None:
    """Add routes by the pin header, and wait until both gateways use them."""
    path = "/admin/v1/policy"
    admin = {"authorization": f"Bearer {_ADMIN_KEY}"}
    current = clients[0].get(path, headers=admin)
    document = current.json()
    for n in range(len(clients)):
        name = f"mac-{n}"
        document["pools"][name] = {"lanes": ["text-mtp"], "workers": {"labels": [name]}}
        route = {"name": name, "when": {"header": {_PIN_HEADER: str(n)}}, "to": [name]}
        document["routes"].insert(0, route)
    headers = {
        **admin,
        "if-match": current.headers["etag"],
        "x-paceline-note": "to compare with round robin",
    }
    clients[0].put(path, json=document, headers=headers).raise_for_status()
    while len({client.get(path, headers=admin).headers["etag"] for client in clients}) > 1:
        time.sleep(0.1)


def measure(clients: Sequence[httpx.Client], prompts: int) -> tuple[Arm, Arm]:
    """Send blocks of new prompts under both rules, alternating."""
    arms = Arm(_AFFINITY), Arm(_ROUND_ROBIN, cycle(range(len(clients))))
    prompts_per_block = max(2, prompts // _BLOCKS)
    _add_pin_routes(clients)
    for client, pin in product(clients, range(2)):  # first requests are slower, and not measured
        _send(client, held_out.fact_prompts(1, 200, seed=1)[0].messages, iter([pin]))
    for block in range(_BLOCKS):
        order = list(range(prompts_per_block))
        Random(block).shuffle(order)
        for index, arm in enumerate(arms if block % 2 == 0 else arms[::-1]):
            held_out_prompts = held_out.fact_prompts(
                prompts_per_block + 1, _TOKENS, seed=1000 + 10 * block + index
            )
            questions = [prompt.messages[1] for prompt in held_out_prompts]
            for n in range(prompts_per_block):
                arm.first.append(_send(clients[n % 2], held_out_prompts[n].messages, arm.pins))
            time.sleep(_SYNC_WAIT_S)
            for n in order:
                messages = (held_out_prompts[n].messages[0], questions[n + 1])
                arm.second.append(_send(clients[(n + 1) % 2], messages, arm.pins))
    return arms


def _row(arm: Arm) -> tuple[str, ...]:
    first_s = mean(request.first_token_s for request in arm.first)
    tokens = median(request.prompt_tokens for request in arm.second)
    second_s = median(request.first_token_s for request in arm.second)
    return (
        arm.name, str(len(arm.second)), f"{tokens:.0f}", f"{1e3 * first_s:.0f}",
        f"{arm.hit_rate:.0%}", f"{1e3 * arm.ttft_s:.0f}", f"{1e3 * second_s:.0f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet.shared_prefix", description=__doc__
    )
    parser.add_argument("--prompts", type=int, default=48, help="for each of the two rules")
    options = parser.parse_args()
    with _fleet() as clients:
        affinity, round_robin = measure(clients, options.prompts)
    hits = affinity.hit_rate / max(round_robin.hit_rate, 1e-9)
    ttft = affinity.ttft_s / round_robin.ttft_s
    grid = Grid(
        title="Two gateways, two workers, system prompts of 4,000 tokens sent twice",
        columns=("", "prompts", "tokens", "first: mean TTFT, ms", "cached",
                 "second: mean TTFT, ms", "... median"),
        rows=(_row(affinity), _row(round_robin)),
    )  # fmt: skip
    targets = Grid(
        title="Targets",
        columns=("", "reached", "target", "met"),
        rows=(
            ("cached, over round robin", f"{hits:.2f}", f">= {_TARGET_HITS}",
             "yes" if hits >= _TARGET_HITS else "NO"),
            ("second mean TTFT, over round robin", f"{ttft:.2f}",
             f"<= {_TARGET_TTFT}", "yes" if ttft <= _TARGET_TTFT else "NO"),
        ),
    )  # fmt: skip
    console = Console(highlight=False, width=110)
    console.print(grid.to_table())
    console.print(targets.to_table())
    introduction = f"# System prompts over two gateways\n\n{(__doc__ or '').strip()}\n"
    RESULTS.write_text(f"{introduction}\n{grid.to_markdown()}\n{targets.to_markdown()}")


if __name__ == "__main__":
    main()
