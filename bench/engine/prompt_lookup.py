"""The speed of an answer that writes a text of its prompt again, by the source of its drafts.

`python -m bench.engine.prompt_lookup` writes `bench/results/prompt_lookup.md`. The demo model
writes a file of its prompt again: without drafts, with those of its head, with prompt lookup, and
with both, in turns in one lane, at 1, 4 and 8 rows; then the same prompts and tokens with mlx-lm,
which drafts nothing. A second table asks everyday questions, whose answers repeat little. Nothing
is reused between runs: the prompts have no isolation scope. Ratios are of tokens per second of
processor time, which other programs of a busy machine change less.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Final

import mlx.core as mx
from rich.console import Console

from bench.engine.measurements import LONG
from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import Grid, provenance, write_page
from paceline.protocol import Speculation
from paceline.request.profile import Sampling
from workers.demo import CHECKPOINT
from workers.engine.decode.row import Row, SpeculationCounter
from workers.engine.engine import Engine, load_engine
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.text.detokenizer import TextStream
from workers.engine.types import EngineSettings, Generation, LaneName, Prompt

RESULTS: Final = Path(__file__).parents[1] / "results"
ROWS: Final = (1, 4, 8)
REPETITIONS: Final = 5
WARM_UPS: Final = 3
ANSWER_TOKENS: Final = 96
DRAFT_TOKENS: Final = 2
MODES: Final[Mapping[str, tuple[bool, bool]]] = {
    "off": (False, False),
    "head": (True, False),
    "lookup": (False, True),
    "both": (True, True),
}
"""Whether the head drafts, and prompt lookup."""
PEER: Final = "mlx-lm"
FILES: Final = tuple(f"Count from {first} to {first + 60}." for first in range(1, 9))
"""Requests whose answers are the files: the demo model copies no long text but its own."""


@dataclass
class Mode:
    """Samples of one mode at one number of rows."""

    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    speculation: Speculation = field(default_factory=Speculation)
    answers: list[list[int]] = field(default_factory=list)


def rewritten(engine: Engine, number: int) -> Prompt:
    """Return a chat that has a file, and asks for it again."""
    request = {"role": "user", "content": FILES[number]}
    plain = Mode()
    run(engine, [Prompt(text=engine.prompts.chat([request]), scope=None)], "off", plain)
    (tokens,) = plain.answers
    file = {"role": "assistant", "content": engine.prompts.decode(tokens)}
    return Prompt(text=engine.prompts.chat([request, file, request]), scope=None)


def asked(engine: Engine, number: int) -> Prompt:
    """Return an everyday question."""
    return Prompt(text=engine.prompts.chat(LONG[number % len(LONG)]), scope=None)


def run(engine: Engine, prompts: Sequence[Prompt], mode: str, result: Mode) -> None:
    """Answer prompts at once; measure from the last join until the first answer ends."""
    (lane,) = engine.lanes
    rows = [_row(engine, lane, prompt, *MODES[mode]) for prompt in prompts]
    for row in rows:
        lane.add(row)
    while lane.running_rows < len(rows) and not any(row.finish_reason for row in rows):
        lane.step()
    before = sum(len(row.answer) for row in rows)
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    while lane.running_rows == len(rows):
        lane.step()
    tokens = sum(len(row.answer) for row in rows) - before
    result.tokens_per_s.append(tokens / (time.perf_counter() - begun_s))
    result.tokens_per_cpu_s.append(tokens / (time.process_time() - begun_cpu_s))
    while lane.busy:
        lane.step()
    result.speculation += sum((row.speculation.total() for row in rows), Speculation())
    result.answers = [row.answer for row in rows]


def _row(engine: Engine, lane: LaneScheduler, prompt: Prompt, head: bool, looks_up: bool) -> Row:
    draft_tokens = DRAFT_TOKENS if head or looks_up else 0
    return Row(
        generation=Generation(
            request_id="bench", lane=lane.name, prompt=prompt, sampling=Sampling(temperature=0)
        ),
        prompt=engine.prompts.prepare(prompt),
        seed=0,
        max_tokens=ANSWER_TOKENS,
        ends=frozenset(),
        draft_tokens=draft_tokens,
        with_head=head,
        looks_up=looks_up,
        text=TextStream(engine.prompts.decode),
        speculation=SpeculationCounter(draft_tokens),
        sink=lambda _: None,
    )


class Peer:
    """mlx-lm in this process, with the weights in the type that our engine has."""

    def __init__(self, model: Path) -> None:
        from mlx_lm import load  # noqa: PLC0415  # no part of our engine

        self._model, self._tokenizer = load(str(model))
        if mx.default_device() == mx.Device(mx.cpu):
            self._model.set_dtype(mx.float32)

    def run(self, prompts: Sequence[Sequence[int]], result: Mode) -> None:
        """Answer prompts at once; the speed is that of decoding, as mlx-lm measures it."""
        from mlx_lm import batch_generate  # noqa: PLC0415

        self._tokenizer.eos_token_ids = set()
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        stats = batch_generate(
            self._model, self._tokenizer, [list(one) for one in prompts], max_tokens=ANSWER_TOKENS
        ).stats
        used_cpus = (time.process_time() - begun_cpu_s) / (time.perf_counter() - begun_s)
        result.tokens_per_s.append(stats.generation_tps)
        result.tokens_per_cpu_s.append(stats.generation_tps / used_cpus)


def measure(engine: Engine, peer: Peer, title: str, make: Callable[[Engine, int], Prompt]) -> Grid:
    """Compare the modes, in turns; the first repetitions warm up.

    In them a lane tries each length and source of drafts, once for each number of rows.
    """
    lines: list[tuple[str, ...]] = []
    for count in ROWS:
        prompts = [make(engine, number) for number in range(count)]
        modes = {name: Mode() for name in MODES}
        peers = Mode()
        for repetition in range(WARM_UPS + REPETITIONS):
            names = list(modes)
            first = repetition % len(names)
            for name in (*names[first:], *names[:first]):
                run(engine, prompts, name, modes[name])
            prepared = [engine.prompts.prepare(prompt).tokens for prompt in prompts]
            peer.run(prepared, peers)
        plain = median(modes["off"].tokens_per_cpu_s[WARM_UPS:])
        for name, mode in modes.items():
            equal = sum(
                one == other for one, other in zip(mode.answers, modes["off"].answers, strict=True)
            )
            sources = mode.speculation.accepted_by_source
            lines.append(
                (
                    str(count),
                    name,
                    *_speeds(mode, plain),
                    f"{mode.speculation.mean_acceptance_length:.2f}",
                    f"{mode.speculation.acceptance_rate:.0%}" if sources else "",
                    str(sources.get("head", 0)),
                    str(sources.get("lookup", 0)),
                    f"{equal} of {count}",
                )
            )
        lines.append((str(count), PEER, *_speeds(peers, plain), *[""] * 5))
    return Grid(
        title=title,
        columns=(
            "rows", "drafts", "tokens/s", "ratio", "tokens per step", "accepted", "of the head",
            "of lookup", "equal answers",
        ),
        rows=tuple(lines),
    )  # fmt: skip


def _speeds(mode: Mode, plain: float) -> tuple[str, str]:
    """Return the tokens per second, and the ratio of those per second of processor time."""
    ratio = median(mode.tokens_per_cpu_s[WARM_UPS:]) / plain
    return f"{median(mode.tokens_per_s[WARM_UPS:]):.0f}", f"{ratio:.2f}"


def main() -> None:
    logging.disable()
    settings = EngineSettings(
        model=CHECKPOINT, served_name="demo", lanes=(LaneName.TEXT_MTP,), draft_tokens=DRAFT_TOKENS
    )
    engine, peer = load_engine(settings), Peer(CHECKPOINT)
    grids = [
        measure(engine, peer, "Answers that write a file of the prompt again", rewritten),
        measure(engine, peer, "Answers to everyday questions", asked),
    ]
    for grid in grids:
        Console(highlight=False, width=120).print(grid.to_table())
    about = (
        f"{provenance()}, MLX {version('mlx')}, mlx-lm {version('mlx-lm')}; medians of "
        f"{REPETITIONS} runs, taken in turn; {ANSWER_TOKENS} tokens per answer, float32 on a CPU. "
        "Ratio: tokens per second of processor time, to those without drafts in our engine."
    )
    write_page(RESULTS / "prompt_lookup.md", "Prompt lookup", about, *grids)
    sys.stdout.flush()


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.prompt_lookup")
    main()
