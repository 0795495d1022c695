"""Sparse prefill of long prompts: its cost in correct answers and its gain in latency.

`python -m bench.engine.spec_prefill` asks the demo model for facts in long prompts, read in full
and sparsely with the model as its own draft, to measure the cost. The gain is measured on a many
times larger target with random weights, since time does not depend on the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

from mlx.utils import tree_flatten
from rich.progress import track

from bench.harness.blas import restart_with_fast_blas
from bench.harness.options import parser
from bench.harness.tables import Grid, cell, provenance, report
from paceline.protocol import Speculation
from tests.support.engine_lane import lanes_of, row_for
from tools.demo_model import held_out
from tools.demo_model.architecture import model_config, new_model
from tools.demo_model.tokenizer import SPECIAL_TOKENS
from workers.engine.lane.memory import measure_memory
from workers.engine.lane.sparse_prefill import SparsePrefill
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.target import Target
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import Event, LaneName, Prompt, SpecPrefillOptions, SpecPrefillSettings

_PROMPT_TOKENS: Final = (1024, 2048, 4096)
_KEEP_SHARES: Final = (0.1, 0.2, 0.3, 0.5, 1.0)
_IN_FULL: Final = SpecPrefillOptions(sparse=False)
_OPTIONS: Final = (
    _IN_FULL,
    *(SpecPrefillOptions(sparse=True, keep_share=share) for share in _KEEP_SHARES),
)
_ANSWER_TOKENS: Final = 32


class TimedAnswer(NamedTuple):
    """An answer with its times."""

    tokens: tuple[int, ...]
    text: str
    ttft_s: float
    scoring_s: float
    """The part of `ttft_s` in which the draft model scored the prompt."""
    speculation: Speculation


Variant = tuple[int, SpecPrefillOptions]
"""A length of prompts, and how they are read."""
Answers = dict[Variant, list[TimedAnswer]]


class Bench:
    """One target, one draft model, and a lane with both."""

    def __init__(self, checkpoint: Checkpoint, draft: Target, draft_tokens: int) -> None:
        self._prompts = PromptRenderer(checkpoint.processor)
        self._draft_tokens = draft_tokens if checkpoint.head else 0
        settings = SpecPrefillSettings(draft=Path())
        (self._lane,) = lanes_of(
            checkpoint,
            self._prompts,
            LaneName.TEXT_MTP,
            draft_tokens=self._draft_tokens,
            max_rows=1,
            chunk_tokens=1024,
            budget_s=0.1,
            memory=measure_memory(checkpoint.target, checkpoint.head),
            sparse_prefill=SparsePrefill(settings, draft, checkpoint.context_tokens),
        )

    def answer(
        self, messages: Sequence[dict[str, Any]], options: SpecPrefillOptions, answer_tokens: int
    ) -> TimedAnswer:
        texts: list[str] = []

        def on_event(event: Event | Exception) -> None:
            if isinstance(event, Exception):
                raise event
            texts.append(getattr(event, "text", ""))

        row = row_for(
            self._lane,
            self._prompts,
            self._prompts.prepare(Prompt(text=self._prompts.chat(messages))),
            self._draft_tokens,
            answer_tokens,
            options={"spec_prefill": options},
            sink=on_event,
        )
        started_s = time.perf_counter()
        scoring_s = ttft_s = 0.0
        self._lane.add(row)
        while self._lane.busy:
            self._lane.step()
            now_s = time.perf_counter() - started_s
            if row.skipped_tokens and not scoring_s:
                scoring_s = now_s
            if row.answer and not ttft_s:
                ttft_s = now_s
        text = "".join(texts).strip()
        return TimedAnswer(tuple(row.answer), text, ttft_s, scoring_s, row.speculation.total())


def answer_all(
    title: str, bench: Bench, prompts: Mapping[int, Sequence[Any]], count: int, answer_tokens: int
) -> Answers:
    """Answer the prompts of every length in every way, the ways in turns."""
    answers: Answers = {variant: [] for variant in product(_PROMPT_TOKENS, _OPTIONS)}
    for number in track(range(count), title):
        for (length, options), kept in answers.items():
            kept.append(bench.answer(prompts[length][number].messages, options, answer_tokens))
    return answers


def measure_quality(checkpoint: Checkpoint, questions: int) -> Grid:
    """Ask for facts in long prompts; count correct answers and those equal to a full prefill."""
    bench = Bench(checkpoint, checkpoint.target, draft_tokens=2)
    prompts = {n: held_out.fact_prompts(questions, n, seed=2) for n in _PROMPT_TOKENS}
    answers = answer_all("Asking the demo model", bench, prompts, questions, _ANSWER_TOKENS)
    rows = []
    for variant, given in answers.items():
        full = answers[variant[0], _IN_FULL]
        pairs = zip(given, prompts[variant[0]], strict=True)
        correct = mean(answer.text == prompt.answer for answer, prompt in pairs)
        equal = mean(one.tokens == other.tokens for one, other in zip(given, full, strict=True))
        drafts = sum((answer.speculation for answer in given), Speculation())
        shares = (correct, equal, drafts.acceptance_rate)
        rows.append((*_labels(variant), *(f"{share:.0%}" for share in shares)))
    return Grid(
        f"Facts found in long prompts by the demo model, {questions} questions per length",
        ("prompt tokens", "selected", "correct", "equal to full", "drafts accepted"),
        rows,
    )


def measure_latency(checkpoint: Checkpoint, repetitions: int) -> Grid:
    """Measure the first token of a large target with a small draft model."""
    target = large_target()
    bench = Bench(replace(checkpoint, target=target, head=None), checkpoint.target, draft_tokens=0)
    prompts = {n: held_out.fact_prompts(repetitions, n, seed=3) for n in _PROMPT_TOKENS}
    answers = answer_all("Timing a large target", bench, prompts, repetitions, 1)
    rows = []
    for variant, given in answers.items():
        ttft_s, scoring_s = _min_s(given, _ttft_s), _min_s(given, lambda one: one.scoring_s)
        full_s = _min_s(answers[variant[0], _IN_FULL], _ttft_s)
        cells = f"{1e3 * ttft_s:.0f}", cell(scoring_s or None, 1e3), f"{full_s / ttft_s:.2f}"
        rows.append((*_labels(variant), *cells))
    ratio = _parameters(target) / _parameters(checkpoint.target)
    return Grid(
        f"First token of a target {ratio:.0f} times as large as its draft model",
        ("prompt tokens", "selected", "first token, ms", "draft only, ms", "speedup"),
        rows,
    )


def large_target() -> Target:
    """Return a many times larger model of the demo's kind and vocabulary, with random weights."""
    config = model_config(dict.fromkeys(SPECIAL_TOKENS, 0))
    config["text_config"] |= {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 128,
    }
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"] * 2
    config["vision_config"]["out_hidden_size"] = 512
    return Target(new_model(config, seed=1))


def _parameters(target: Target) -> int:
    return sum(array.size for _, array in tree_flatten(target.language.parameters()))


def _labels(variant: Variant) -> tuple[int, str]:
    share = variant[1].keep_share
    return variant[0], "in full" if share is None else f"{share:.0%}"


def _ttft_s(answer: TimedAnswer) -> float:
    return answer.ttft_s


def _min_s(answers: Sequence[TimedAnswer], time_of: Callable[[TimedAnswer], float]) -> float:
    """Return the minimum of all repetitions: other processes only add time."""
    return min(map(time_of, answers))


def main() -> None:
    made = parser("engine.spec_prefill", __doc__, quick=False, model=True)
    made.add_argument("--questions", type=int, default=40, help="for each prompt length")
    made.add_argument("--repetitions", type=int, default=3, help="timings at each length")
    options = made.parse_args()
    checkpoint = load_checkpoint(options.model)
    grids = (
        measure_quality(checkpoint, options.questions),
        measure_latency(checkpoint, options.repetitions),
    )
    about = f"{provenance()}, MLX {version('mlx')}. Greedy answers; the demo model is the draft."
    noise = (
        "A full prefill and 100% selected are the same work: the difference of their times is "
        "the noise."
    )
    report("spec_prefill.md", "SpecPrefill", about, noise, *grids)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.spec_prefill")
    main()
