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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Final

import mlx.core as mx

from bench.engine.measurements import LONG
from bench.harness.blas import restart_with_fast_blas
from bench.harness.samples import rotated
from bench.harness.tables import Grid, provenance, report
from paceline.protocol import Speculation
from tests.support.engine_lane import row_for
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine, load_engine
from workers.engine.types import EngineSettings, LaneName, Prompt

_ROWS: Final = (1, 4, 8)
_REPETITIONS: Final = 5
_WARM_UPS: Final = 3
_ANSWER_TOKENS: Final = 96
_DRAFT_TOKENS: Final = 2
_MODES: Final[Mapping[str, tuple[bool, bool]]] = {
    "off": (False, False),
    "head": (True, False),
    "lookup": (False, True),
    "both": (True, True),
}
"""Whether the head drafts, and prompt lookup."""


@dataclass
class Mode:
    """Samples of one mode at one number of rows."""

    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    speculation: Speculation = field(default_factory=Speculation)
    answers: list[list[int]] = field(default_factory=list)

    def speeds(self, plain: float) -> tuple[str, str]:
        """Return the tokens per second, and the ratio of those per second of processor time."""
        speed = median(self.tokens_per_s[_WARM_UPS:])
        return f"{speed:.0f}", f"{median(self.tokens_per_cpu_s[_WARM_UPS:]) / plain:.2f}"


def rewritten(engine: Engine, number: int) -> Prompt:
    """Return a chat that has a file, and asks for it again.

    The file is an answer of the demo model, which copies no other long text.
    """
    request = {"role": "user", "content": f"Count from {number + 1} to {number + 61}."}
    plain = Mode()
    run(engine, [Prompt(text=engine.prompts.chat([request]), scope=None)], "off", plain)
    (tokens,) = plain.answers
    file = {"role": "assistant", "content": engine.prompts.decode(tokens)}
    return Prompt(text=engine.prompts.chat([request, file, request]), scope=None)


def asked(engine: Engine, number: int) -> Prompt:
    return Prompt(text=engine.prompts.chat(LONG[number % len(LONG)]), scope=None)


def run(engine: Engine, prompts: Sequence[Prompt], mode: str, result: Mode) -> None:
    """Answer prompts at once; measure from the last join until the first answer ends."""
    (lane,) = engine.lanes
    head, looks_up = _MODES[mode]
    drafts = _DRAFT_TOKENS if head or looks_up else 0
    rows = []
    for prompt in prompts:
        prepared = engine.prompts.prepare(prompt)
        row = row_for(
            lane,
            engine.prompts,
            prepared,
            drafts,
            _ANSWER_TOKENS,
            ends=frozenset(),
            draft_tokens_fixed=False,
            with_head=head,
            looks_up=looks_up,
        )
        rows.append(row)
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


class Peer:
    """mlx-lm in this process, with the weights in the type that our engine has."""

    def __init__(self, model: Path) -> None:
        from mlx_lm import load  # noqa: PLC0415  # no part of our engine

        self._model, self._tokenizer = load(str(model))
        if mx.default_device() == mx.Device(mx.cpu):
            self._model.set_dtype(mx.float32)
        self._tokenizer.eos_token_ids = set()

    def run(self, prompts: Sequence[Sequence[int]], result: Mode) -> None:
        """Answer prompts at once; the speed is that of decoding, as mlx-lm measures it."""
        from mlx_lm import batch_generate  # noqa: PLC0415

        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        texts = [list(one) for one in prompts]
        answer = batch_generate(self._model, self._tokenizer, texts, max_tokens=_ANSWER_TOKENS)
        used_cpus = (time.process_time() - begun_cpu_s) / (time.perf_counter() - begun_s)
        result.tokens_per_s.append(answer.stats.generation_tps)
        result.tokens_per_cpu_s.append(answer.stats.generation_tps / used_cpus)


def measure(engine: Engine, peer: Peer, title: str, make: Callable[[Engine, int], Prompt]) -> Grid:
    """Compare the modes, in turns; the first repetitions warm up.

    In them a lane tries each length and source of drafts, once for each number of rows.
    """
    lines: list[tuple[object, ...]] = []
    for count in _ROWS:
        prompts = [make(engine, number) for number in range(count)]
        modes = {name: Mode() for name in _MODES}
        of_peer = Mode()
        for repetition in range(_WARM_UPS + _REPETITIONS):
            for name in rotated([*modes], repetition):
                run(engine, prompts, name, modes[name])
            peer.run([engine.prompts.prepare(prompt).tokens for prompt in prompts], of_peer)
        off = modes["off"]
        plain = median(off.tokens_per_cpu_s[_WARM_UPS:])
        for name, mode in modes.items():
            pairs = zip(mode.answers, off.answers, strict=True)
            speculation = mode.speculation
            sources = speculation.accepted_by_source
            lines.append(
                (
                    *(count, name, *mode.speeds(plain)),
                    f"{speculation.mean_acceptance_length:.2f}",
                    f"{speculation.acceptance_rate:.0%}" if sources else "",
                    *(sources.get(source, 0) for source in ("head", "lookup")),
                    f"{sum(one == other for one, other in pairs)} of {count}",
                )
            )
        lines.append((count, "mlx-lm", *of_peer.speeds(plain), *[""] * 5))
    columns = (
        *("rows", "drafts", "tokens/s", "ratio", "tokens per step", "accepted", "of the head"),
        *("of lookup", "equal answers"),
    )
    return Grid(title, columns, lines)


def main() -> None:
    logging.disable()
    settings = EngineSettings(
        model=CHECKPOINT, served_name="demo", lanes=(LaneName.TEXT_MTP,), draft_tokens=_DRAFT_TOKENS
    )
    engine, peer = load_engine(settings), Peer(CHECKPOINT)
    grids = [
        measure(engine, peer, "Answers that write a file of the prompt again", rewritten),
        measure(engine, peer, "Answers to everyday questions", asked),
    ]
    about = (
        f"{provenance()}, MLX {version('mlx')}, mlx-lm {version('mlx-lm')}; medians of "
        f"{_REPETITIONS} runs, taken in turn; {_ANSWER_TOKENS} tokens per answer, float32 on a "
        "CPU. Ratio: tokens per second of processor time, to those without drafts in our engine."
    )
    report("prompt_lookup.md", "Prompt lookup", about, *grids)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.prompt_lookup")
    main()
