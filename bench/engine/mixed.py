"""The speed of rows of both lanes at once, beside as many rows of one kind.

`python -m bench.engine.mixed` writes `bench/results/mixed.md`. Sampled rows decode in the `vlm`
lane and all others in the speculative one, in one process without HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from importlib.metadata import version
from statistics import harmonic_mean, median
from typing import Final

from rich.progress import track

from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import Grid, provenance, report
from paceline.request.constraint import Constraint, ConstraintKind
from paceline.request.profile import Sampling
from tests.support.engine_lane import GREEDY, lanes_of, row_for
from workers.demo import CHECKPOINT
from workers.engine.decode.row import Row
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.text.grammar import GrammarCompiler
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import LaneName


class Kind(Enum):
    """What a row asks for."""

    GREEDY = auto()
    SAMPLED = auto()
    EXPRESSION = auto()
    EXACT = auto()


_HALVES: Final = (1, 2, 4)
"""Rows of each kind."""
_ALL_ROWS: Final = (1, 4, 8, 16)
_PROMPT_TOKENS: Final = 8000
_DRAFT_TOKENS: Final = 2
_TOKENS: Final = 1200
_TURNS: Final = 7
_ENDLESS: Final = 1 << 20
_SAMPLED: Final = Sampling(temperature=0.8, top_p=0.9)


class Traffic:
    """Rows of an engine, decoded until they have so many further tokens."""

    def __init__(self, checkpoint: Checkpoint, kinds: Iterable[Kind], max_rows: int = 8) -> None:
        self._prompts = prompts = PromptRenderer(checkpoint.processor)
        self._lanes = lanes_of(
            checkpoint, prompts, *LaneName, draft_tokens=_DRAFT_TOKENS, max_rows=max_rows,
            chunk_tokens=1024, budget_s=0.1,
        )  # fmt: skip
        self._grammars = GrammarCompiler(
            checkpoint.processor, checkpoint.vocabulary, checkpoint.eos
        )
        self._rows = [self._add(number, kind) for number, kind in enumerate(kinds)]

    def _add(self, number: int, kind: Kind) -> Row:
        lane = self._lanes[kind is Kind.SAMPLED]
        exact = kind is Kind.EXACT
        row = row_for(
            lane, self._prompts, _prompt(24, number), 0 if exact else _DRAFT_TOKENS, _ENDLESS,
            sampling=_SAMPLED if kind is Kind.SAMPLED else GREEDY, ends=frozenset(),
            draft_tokens_fixed=False, options={"exact": exact},
        )  # fmt: skip
        if kind is Kind.EXPRESSION:
            constraint = Constraint(ConstraintKind.REGEX, "([a-z]{1,9} )+", "guided_regex")
            row.matcher = asyncio.run(self._grammars.matcher(constraint))
        lane.add(row)
        return row

    def _step(self) -> None:
        for lane in self._lanes:
            if lane.busy:
                lane.step()

    def decode(self, tokens: int = _TOKENS) -> float:
        """Decode so many further tokens; return the seconds."""
        begun_s, wanted = time.perf_counter(), self._tokens() + tokens
        while self._tokens() < wanted:
            self._step()
        return time.perf_counter() - begun_s

    def read(self, tokens: int) -> tuple[float, float]:
        """Read a prompt of so many tokens; return the seconds, and the tokens/s of the rows."""
        row = row_for(self._lanes[1], self._prompts, _prompt(tokens, 5), 0, 1)
        begun_s, before = time.perf_counter(), self._tokens()
        self._lanes[1].add(row)
        while not row.answer:
            self._step()
        seconds = time.perf_counter() - begun_s
        return seconds, (self._tokens() - before) / seconds

    def steps(self) -> tuple[int, int]:
        """Return the steps so far, and those that were ahead."""
        reports = [lane.counters.report() for lane in self._lanes]
        return sum(one.steps for one in reports), sum(one.steps_ahead for one in reports)

    def _tokens(self) -> int:
        return sum(len(row.answer) for row in self._rows)


def _prompt(tokens: int, number: int) -> PreparedPrompt:
    return PreparedPrompt(tokens=tuple(20 + (at * 7 + number) % 900 for at in range(tokens)))


def tokens_per_s(checkpoint: Checkpoint, greedy: int, sampled: int) -> tuple[float, float]:
    """Return the tokens per second of such rows, and the share of steps ahead."""
    traffic = Traffic(checkpoint, [Kind.GREEDY] * greedy + [Kind.SAMPLED] * sampled)
    traffic.decode()  # the lanes measure which drafts pay
    steps, ahead = traffic.steps()
    seconds = traffic.decode()
    all_steps, all_ahead = traffic.steps()
    return _TOKENS / seconds, (all_ahead - ahead) / (all_steps - steps)


def all_kinds(checkpoint: Checkpoint, count: int) -> tuple[float, float, float, float]:
    """Return the tokens per second of rows of all kinds, alone and while a prompt is read.

    Then the seconds of that prompt, and the share of steps ahead meanwhile.
    """
    traffic = Traffic(checkpoint, itertools.islice(itertools.cycle(Kind), count), max_rows=count)
    traffic.decode()
    seconds = traffic.decode()
    traffic.read(1024)
    steps, ahead = traffic.steps()
    prompt_s, meanwhile = traffic.read(_PROMPT_TOKENS)
    all_steps, all_ahead = traffic.steps()
    return _TOKENS / seconds, meanwhile, prompt_s, (all_ahead - ahead) / (all_steps - steps)


def lines(checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    """Measure mixes and what they consist of, in turns."""
    for half in track(_HALVES, description="Measuring"):
        kinds = (2 * half, 0), (0, 2 * half), (half, half)
        turns = [[tokens_per_s(checkpoint, *kind) for kind in kinds] for _ in range(_TURNS)]
        speeds = [median(turn[at][0] for turn in turns) for at in range(len(kinds))]
        ratio = median(turn[2][0] / harmonic_mean([turn[0][0], turn[1][0]]) for turn in turns)
        ahead = median(turn[2][1] for turn in turns)
        cells = *(f"{speed:.0f}" for speed in speeds), f"{ratio:.2f}", f"{ahead:.2f}"
        yield f"{half} and {half}", *cells


def lines_of_all_kinds(checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    """Measure rows of all kinds beside the prompt of an agent."""
    for count in track(_ALL_ROWS, description="Measuring"):
        turns = [all_kinds(checkpoint, count) for _ in range(_TURNS)]
        alone, meanwhile, prompt_s, ahead = (median(column) for column in zip(*turns, strict=True))
        yield f"{count}", f"{alone:.0f}", f"{meanwhile:.0f}", f"{prompt_s:.2f}", f"{ahead:.2f}"


def main() -> None:
    logging.disable()
    columns = ("greedy and sampled", "all greedy", "all sampled", "mixed", "ratio", "steps ahead")
    about = (
        f"{provenance()}, MLX {version('mlx')}; medians of {_TURNS} turns of {_TOKENS} tokens each."
        " Ratio: of the mix to the harmonic mean of as many rows of each kind. A step is ahead if "
        "the device has another one to compute while the host reads it."
    )
    checkpoint = load_checkpoint(CHECKPOINT)
    grids = (
        Grid("Tokens per second of rows in both lanes", columns, [*lines(checkpoint)]),
        Grid(
            f"Greedy, sampled, exact rows and those of an expression; a prompt of {_PROMPT_TOKENS}",
            (
                "rows",
                "tokens/s",
                "tokens/s beside the prompt",
                "prompt, s",
                "steps ahead meanwhile",
            ),
            [*lines_of_all_kinds(checkpoint)],
        ),
    )
    report("mixed.md", "Rows of both lanes at once", about, *grids)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.mixed")
    main()
