"""The distribution of sampled text with and without speculation, from many thousand draws.

`python -m bench.engine.sampling_distribution` draws the first tokens of one answer from a small
vocabulary (top_k) with and without drafts, with different seeds, and compares the frequencies of
the texts: total variation and a two-sample chi-square. The negative control, with drafts but at
another temperature, must differ. With equal seeds, all texts must be equal.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import erfc, pi, sqrt
from typing import Final

from rich.progress import track

from bench.harness.options import parser
from bench.harness.tables import Grid, provenance, report
from paceline.protocol import Speculation
from paceline.request.profile import Sampling
from tests.support.engine_answers import answer
from tests.support.served_engine import running_engine
from tools.demo_model.world import SYSTEM_OPENINGS
from workers.engine.engine import Engine
from workers.engine.types import LaneName, Prompt

TOKENS: Final = 7
TOP_K: Final = 4
TEMPERATURE: Final = 1.3
CONTROL_TEMPERATURE: Final = 1.5
CONCURRENCY: Final = 32
QUICK_DRAWS: Final = 500
MIN_CELL_COUNT: Final = 10
SIGNIFICANCE: Final = 0.001
"""A p value below this means that two distributions differ."""
QUESTION: Final = (
    {"role": "system", "content": " ".join(SYSTEM_OPENINGS[:2])},
    {"role": "user", "content": "Tell me a story."},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of two samples of texts."""

    total_variation: float
    expected_variation: float
    """The mean total variation of two samples of one distribution."""
    chi_square: float
    degrees: int

    @property
    def p_value(self) -> float:
        """Return the probability of at least this chi-square for samples of one distribution.

        Wilson and Hilferty 1931: the cube root of a chi-square is nearly normal.
        """
        spread = 2 / (9 * self.degrees)
        deviation = (self.chi_square / self.degrees) ** (1 / 3) - (1 - spread)
        return erfc(deviation / sqrt(2 * spread)) / 2

    @property
    def equal(self) -> bool:
        return self.p_value >= SIGNIFICANCE


def compare(first: Iterable[str], second: Iterable[str]) -> Comparison:
    """Compare two samples; rare texts share one cell."""
    counts = Counter(first), Counter(second)
    sizes = counts[0].total(), counts[1].total()
    cells: list[tuple[int, int]] = []
    rare = [0, 0]
    for text in counts[0] | counts[1]:
        cell = counts[0][text], counts[1][text]
        if sum(cell) >= MIN_CELL_COUNT:
            cells.append(cell)
        else:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
    if sum(rare) >= MIN_CELL_COUNT:
        cells.append((rare[0], rare[1]))
    weights = sqrt(sizes[1] / sizes[0]), sqrt(sizes[0] / sizes[1])
    shares = [(a + b) / sum(sizes) for a, b in cells]
    spread = 1 / sizes[0] + 1 / sizes[1]
    return Comparison(
        total_variation=sum(abs(a / sizes[0] - b / sizes[1]) for a, b in cells) / 2,
        expected_variation=sum(sqrt(2 / pi * p * (1 - p) * spread) for p in shares) / 2,
        chi_square=sum((weights[0] * a - weights[1] * b) ** 2 / (a + b) for a, b in cells),
        degrees=len(cells) - 1,
    )


class Sampler:
    """A sampler of short answers to one question."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        text = engine.prompts.chat(QUESTION)
        # The whole prompt is a shared prefix: it is read once and restored for each draw.
        self._prompt = Prompt(text=text, prefix_text=text)
        self.speculation = Speculation()

    async def draw(
        self, seeds: Sequence[int], *, temperature: float, draft_tokens: int, label: str
    ) -> list[str]:
        """Return the text of each seed, with enough concurrent requests to fill the lane."""
        self.speculation = Speculation()
        texts = [""] * len(seeds)
        seeds_left = iter(track([*enumerate(seeds)], label, disable=not sys.stdout.isatty()))

        async def draw_next() -> None:
            for at, seed in seeds_left:
                texts[at] = await self._draw_one(seed, temperature, draft_tokens)

        await asyncio.gather(*(draw_next() for _ in range(CONCURRENCY)))
        return texts

    async def _draw_one(self, seed: int, temperature: float, draft_tokens: int) -> str:
        text, end = await answer(
            self._engine,
            "",
            prompt=self._prompt,
            sampling=Sampling(temperature=temperature, top_k=TOP_K, seed=seed),
            max_tokens=TOKENS,
            draft_tokens=draft_tokens,
        )
        self.speculation += end.speculation
        return text


async def measure(engine: Engine, draws: int, *, check_control: bool) -> tuple[Grid, bool]:
    """Draw all samples; return the table, and whether all comparisons are as expected.

    The control must differ only with `check_control`, that is with enough draws.
    """
    sampler = Sampler(engine)
    seeds, other_seeds = range(draws), range(draws, 2 * draws)
    plain = await sampler.draw(seeds, temperature=TEMPERATURE, draft_tokens=0, label="plain")
    drafted = await sampler.draw(
        other_seeds, temperature=TEMPERATURE, draft_tokens=2, label="drafted"
    )
    speculation = sampler.speculation
    control = await sampler.draw(
        other_seeds[: draws // 4], temperature=CONTROL_TEMPERATURE, draft_tokens=2, label="control"
    )
    repeated_seeds = seeds[: draws // 10]
    repeated = await sampler.draw(
        repeated_seeds, temperature=TEMPERATURE, draft_tokens=2, label="same seeds"
    )
    equal_texts = sum(a == b for a, b in zip(plain, repeated, strict=False))
    comparison, control_comparison = compare(plain, drafted), compare(plain, control)
    same_seeds = f"same seeds: {equal_texts} of {len(repeated_seeds)} texts equal"
    rows = (
        _row(f"drafted, {speculation.acceptance_rate:.0%} of drafts accepted", comparison),
        _row(f"control, temperature {CONTROL_TEMPERATURE} for {TEMPERATURE}", control_comparison),
        (same_seeds, *[""] * 5),
    )
    title = f"{draws} draws of {TOKENS} tokens, top_k {TOP_K}: drafted against plain"
    grid = Grid(title, ("", "total variation", "noise floor", "chi-square", "degrees", "p"), rows)
    has_drafts = speculation.accepted > 0 and speculation.rejected > 0
    control_failed = check_control and control_comparison.equal
    all_repeated = equal_texts == len(repeated_seeds)
    return grid, comparison.equal and not control_failed and all_repeated and has_drafts


def _row(label: str, comparison: Comparison) -> tuple[str, ...]:
    return (
        label,
        f"{comparison.total_variation:.4f}",
        f"{comparison.expected_variation:.4f}",
        f"{comparison.chi_square:.1f}",
        str(comparison.degrees),
        f"{comparison.p_value:.2g}",
    )


def main() -> None:
    made = parser("engine.sampling_distribution", __doc__, model=True)
    made.add_argument("--draws", type=int, default=20_000, help="of each kind")
    options = made.parse_args()
    sizes = {"lanes": (LaneName.TEXT_MTP,), "max_rows": CONCURRENCY}
    draws = QUICK_DRAWS if options.quick else options.draws
    started_s = time.perf_counter()
    with running_engine(options.model.resolve(), **sizes) as engine:
        grid, passed = asyncio.run(measure(engine, draws, check_control=not options.quick))
    about = (
        f"{provenance()}, {(time.perf_counter() - started_s) / 60:.0f} minutes. Texts "
        "drawn with drafts are compared with texts drawn without them, with other seeds; the "
        f"control, at another temperature, must differ (p below {SIGNIFICANCE}). The noise floor "
        "is the mean difference of two samples of one distribution of the same size."
    )
    name = "sampling_distribution.md"
    report(name, "Sampling with drafts", about, grid, write=not options.quick)
    if not passed:
        sys.exit("Drafted and plain text differ, or the control does not.")


if __name__ == "__main__":
    main()
