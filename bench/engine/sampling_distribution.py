"""Does speculation leave sampled text as it is? Drawn many thousand times, not argued.

`python -m bench.engine.sampling_distribution` draws the first tokens of one answer from a small
vocabulary (top_k) with and without drafts, with other seeds, and compares how often each text came:
total variation and a two-sample chi-square. The negative control, drafted as well but at another
temperature, must be told apart. With equal seeds the texts must be equal one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from math import erfc, pi, sqrt
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import track

from bench.harness.tables import Grid
from policies.request.profile import Sampling
from tools.demo_model.world import SYSTEM_OPENINGS
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine
from workers.engine.types import Delta, EngineSettings, Generation, LaneName, Prompt
from workers.protocol import Speculation

RESULTS: Final = Path(__file__).parents[1] / "results"
TOKENS: Final = 7
TOP_K: Final = 4
TEMPERATURE: Final = 1.3
CONTROL_TEMPERATURE: Final = 1.5
AT_A_TIME: Final = 32
QUICK_DRAWS: Final = 500
FEWEST_IN_A_CELL: Final = 10
SURE: Final = 0.001
"""A p value below this tells two distributions apart."""
QUESTION: Final = (
    {"role": "system", "content": " ".join(SYSTEM_OPENINGS[:2])},
    {"role": "user", "content": "Tell me a story."},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two samples of texts, held against each other."""

    total_variation: float
    expected_variation: float
    """What two samples of one distribution differ by, on average."""
    chi_square: float
    degrees: int

    @property
    def p_value(self) -> float:
        """Return the chance of so much difference between samples of one distribution.

        Wilson and Hilferty 1931: the cube root of a chi-square is nearly normal.
        """
        spread = 2 / (9 * self.degrees)
        deviation = (self.chi_square / self.degrees) ** (1 / 3) - (1 - spread)
        return erfc(deviation / sqrt(2 * spread)) / 2

    @property
    def same(self) -> bool:
        """Say whether nothing tells the two apart."""
        return self.p_value >= SURE


def compare(first: Iterable[str], second: Iterable[str]) -> Comparison:
    """Compare two samples; texts that hardly ever came are one cell together."""
    counts = Counter(first), Counter(second)
    sizes = counts[0].total(), counts[1].total()
    cells: list[tuple[int, int]] = []
    rare = [0, 0]
    for text in counts[0] | counts[1]:
        cell = counts[0][text], counts[1][text]
        if sum(cell) >= FEWEST_IN_A_CELL:
            cells.append(cell)
        else:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
    if sum(rare) >= FEWEST_IN_A_CELL:
        cells.append((rare[0], rare[1]))
    weights = sqrt(sizes[1] / sizes[0]), sqrt(sizes[0] / sizes[1])
    shares = [(one + other) / sum(sizes) for one, other in cells]
    spread = 1 / sizes[0] + 1 / sizes[1]
    return Comparison(
        total_variation=sum(abs(a / sizes[0] - b / sizes[1]) for a, b in cells) / 2,
        expected_variation=sum(sqrt(2 / pi * p * (1 - p) * spread) for p in shares) / 2,
        chi_square=sum((weights[0] * a - weights[1] * b) ** 2 / (a + b) for a, b in cells),
        degrees=len(cells) - 1,
    )


class Drawer:
    """Draws short answers to one question from an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        text = engine.prompts.chat(QUESTION)
        # All but its end is shared on purpose: it is read once and restored for each draw.
        self._prompt = Prompt(text=text, prefix_text=text)
        self.speculation = Speculation()

    async def draw(
        self, seeds: Sequence[int], *, temperature: float, draft_tokens: int, what: str
    ) -> list[str]:
        """Return the text of each seed; so many are asked for at any time that the lane is full."""
        self.speculation = Speculation()
        texts = [""] * len(seeds)
        waiting = iter(track([*enumerate(seeds)], what, disable=not sys.stdout.isatty()))

        async def draw_on() -> None:
            for at, seed in waiting:
                texts[at] = await self._one(seed, temperature, draft_tokens)

        await asyncio.gather(*(draw_on() for _ in range(AT_A_TIME)))
        return texts

    async def _one(self, seed: int, temperature: float, draft_tokens: int) -> str:
        generation = Generation(
            request_id=f"draw-{seed}",
            lane=LaneName.TEXT_MTP,
            prompt=self._prompt,
            sampling=Sampling(temperature=temperature, top_k=TOP_K, seed=seed),
            max_tokens=TOKENS,
            draft_tokens=draft_tokens,
        )
        text = ""
        async with aclosing(self._engine.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    text += event.text
                else:
                    self.speculation += event.speculation
        return text


async def measure(engine: Engine, draws: int, *, sharp: bool) -> tuple[Grid, bool]:
    """Draw all samples; return the table, and whether everything in it is as it should be.

    The control is only expected to be told apart where there are enough draws to be sharp.
    """
    drawer = Drawer(engine)
    seeds, others = range(draws), range(draws, 2 * draws)
    plain = await drawer.draw(seeds, temperature=TEMPERATURE, draft_tokens=0, what="plain")
    drafted = await drawer.draw(others, temperature=TEMPERATURE, draft_tokens=2, what="drafted")
    speculation = drawer.speculation
    control = await drawer.draw(
        others[: draws // 4], temperature=CONTROL_TEMPERATURE, draft_tokens=2, what="control"
    )
    twins = seeds[: draws // 10]
    again = await drawer.draw(twins, temperature=TEMPERATURE, draft_tokens=2, what="same seeds")
    equal = sum(one == other for one, other in zip(plain, again, strict=False))
    found, told_apart = compare(plain, drafted), compare(plain, control)
    grid = Grid(
        title=f"{draws} draws of {TOKENS} tokens, top_k {TOP_K}: drafted against plain",
        columns=("", "total variation", "noise floor", "chi-square", "degrees", "p"),
        rows=(
            _row(f"drafted, {speculation.acceptance_rate:.0%} of drafts kept", found),
            _row(f"control, temperature {CONTROL_TEMPERATURE} for {TEMPERATURE}", told_apart),
            (f"same seeds: {equal} of {len(twins)} texts equal", *[""] * 5),
        ),
    )
    drafts_judged = speculation.accepted > 0 and speculation.rejected > 0
    blind = sharp and told_apart.same
    return grid, found.same and not blind and equal == len(twins) and drafts_judged


def _row(label: str, found: Comparison) -> tuple[str, ...]:
    return (
        label,
        f"{found.total_variation:.4f}",
        f"{found.expected_variation:.4f}",
        f"{found.chi_square:.1f}",
        str(found.degrees),
        f"{found.p_value:.2g}",
    )


def _about(took_min: float) -> str:
    now = datetime.now(UTC).isoformat(sep=" ", timespec="minutes").removesuffix("+00:00")
    return (
        f"{now} UTC, {platform.system()} {platform.machine()}, {took_min:.0f} minutes. Texts drawn "
        "with drafts beside texts drawn without, with other seeds; the control, at another "
        f"temperature, must be told apart (p below {SURE}). The noise floor is how far two "
        "samples of one distribution lie apart on average, with as many draws."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.sampling_distribution")
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--draws", type=int, default=20_000, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="few draws; writes no results")
    options = parser.parse_args(arguments)
    settings = EngineSettings(
        model=options.model.resolve(),
        served_name="bench",
        lanes=(LaneName.TEXT_MTP,),
        max_rows=AT_A_TIME,
    )
    draws = QUICK_DRAWS if options.quick else options.draws
    begun_s = time.perf_counter()
    engine = Engine.start(settings)
    try:
        grid, right = asyncio.run(measure(engine, draws, sharp=not options.quick))
    finally:
        engine.stop()
    took_min = (time.perf_counter() - begun_s) / 60
    console = Console(highlight=False)
    console.print(grid.drawn())
    console.print(f"{took_min:.1f} minutes")
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        page = f"# Sampling with drafts\n\n{_about(took_min)}\n\n{grid.markdown()}"
        (RESULTS / "sampling_distribution.md").write_text(page)
    if not right:
        sys.exit("Drafted text is not what plain text is, or the control was not told apart.")


if __name__ == "__main__":
    main()
