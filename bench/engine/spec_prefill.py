"""Sparse prefill of long prompts: its cost in correct answers and its gain in latency.

`python -m bench.engine.spec_prefill` asks the demo model for facts in long prompts, read in full
and sparsely with the model as its own draft, to measure the cost. The gain is measured on a many
times larger target with random weights, since time does not depend on the weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, Final

from mlx.utils import tree_flatten
from rich.console import Console
from rich.progress import track

from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import MISSING, Grid, provenance, write_page
from paceline.protocol import Speculation
from paceline.request.profile import Sampling
from tools.demo_model import held_out
from tools.demo_model.architecture import model_config, new_model
from tools.demo_model.tokenizer import SPECIAL_TOKENS
from workers.demo import CHECKPOINT
from workers.engine.decode.row import Row, SpeculationCounter
from workers.engine.lane.admission import Admission
from workers.engine.lane.memory import measure_memory
from workers.engine.lane.scheduler import EngineParts, LaneScheduler
from workers.engine.lane.sparse_prefill import SparsePrefill
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.target import Target
from workers.engine.prefix.cache import PrefixCache
from workers.engine.text.detokenizer import TextStream
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import (
    Event,
    Generation,
    LaneName,
    LaneSettings,
    Prompt,
    SpecPrefillOptions,
    SpecPrefillSettings,
)

RESULTS: Final = Path(__file__).parents[1] / "results"
PROMPT_TOKENS: Final = (1024, 2048, 4096)
KEEP_SHARES: Final = (0.1, 0.2, 0.3, 0.5, 1.0)
IN_FULL: Final = SpecPrefillOptions(sparse=False)
ANSWER_TOKENS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """An answer with its times."""

    tokens: tuple[int, ...]
    text: str
    skipped_tokens: int
    ttft_s: float
    scoring_s: float
    """The part of `ttft_s` in which the draft model scored the prompt."""
    speculation: Speculation


@dataclass
class Variant:
    """All answers with one length and one kind of prefill."""

    prompt_tokens: int
    options: SpecPrefillOptions
    answers: list[TimedAnswer] = field(default_factory=list)


class Bench:
    """One target, one draft model, and a lane with both."""

    def __init__(self, checkpoint: Checkpoint, draft: Target, draft_tokens: int) -> None:
        self.prompts = PromptRenderer(checkpoint.processor)
        self._draft_tokens = draft_tokens if checkpoint.head else 0
        memory = measure_memory(checkpoint.target, checkpoint.head)
        parts = EngineParts(
            settings=LaneSettings(draft_tokens=self._draft_tokens, max_rows=1),
            checkpoint=checkpoint,
            prompts=self.prompts,
            admission=Admission(checkpoint.target, memory, PrefixCache(0)),
            sparse_prefill=SparsePrefill(
                SpecPrefillSettings(draft=Path()), draft, checkpoint.context_tokens
            ),
        )
        self._lane = LaneScheduler(LaneName.TEXT_MTP, parts)

    def answer(
        self, messages: Sequence[dict[str, Any]], options: SpecPrefillOptions, answer_tokens: int
    ) -> TimedAnswer:
        """Answer one prompt in an idle lane."""
        text = self.prompts.chat(messages)
        return self._run(self.prompts.prepare(Prompt(text=text)), options, answer_tokens)

    def _run(
        self, prompt: PreparedPrompt, options: SpecPrefillOptions, answer_tokens: int
    ) -> TimedAnswer:
        texts: list[str] = []

        def on_event(event: Event | Exception) -> None:
            if isinstance(event, Exception):
                raise event
            texts.append(getattr(event, "text", ""))

        row = Row(
            generation=Generation(
                request_id="bench",
                lane=LaneName.TEXT_MTP,
                prompt=Prompt(text=""),
                sampling=Sampling(temperature=0),
                spec_prefill=options,
            ),
            prompt=prompt,
            seed=0,
            max_tokens=answer_tokens,
            ends=self._lane.ends,
            draft_tokens=self._draft_tokens,
            draft_tokens_fixed=True,
            text=TextStream(self.prompts.decode),
            speculation=SpeculationCounter(self._draft_tokens),
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
        return TimedAnswer(
            tokens=tuple(row.answer),
            text="".join(texts).strip(),
            skipped_tokens=row.skipped_tokens,
            ttft_s=ttft_s,
            scoring_s=scoring_s,
            speculation=row.speculation.total(),
        )


def variants() -> list[Variant]:
    """Return every length, read in full and with every share."""
    option_sets = (
        IN_FULL,
        *(SpecPrefillOptions(sparse=True, keep_share=share) for share in KEEP_SHARES),
    )
    return [
        Variant(prompt_tokens=tokens, options=options)
        for tokens in PROMPT_TOKENS
        for options in option_sets
    ]


def measure_quality(checkpoint: Checkpoint, questions: int) -> Grid:
    """Ask for facts in long prompts; count correct answers and those equal to a full prefill."""
    bench = Bench(checkpoint, checkpoint.target, draft_tokens=2)
    prompts_by_length = {
        tokens: held_out.fact_prompts(questions, tokens, seed=2) for tokens in PROMPT_TOKENS
    }
    all_variants = variants()
    for number in track(range(questions), "Asking the demo model"):
        for variant in all_variants:
            messages = prompts_by_length[variant.prompt_tokens][number].messages
            variant.answers.append(bench.answer(messages, variant.options, ANSWER_TOKENS))
    full = {
        variant.prompt_tokens: variant for variant in all_variants if variant.options is IN_FULL
    }

    def row(variant: Variant) -> tuple[str, ...]:
        prompts = prompts_by_length[variant.prompt_tokens]
        correct = mean(
            answer.text == prompt.answer
            for answer, prompt in zip(variant.answers, prompts, strict=True)
        )
        equal = mean(
            answer.tokens == full_answer.tokens
            for answer, full_answer in zip(
                variant.answers, full[variant.prompt_tokens].answers, strict=True
            )
        )
        drafts = sum((answer.speculation for answer in variant.answers), Speculation())
        return (
            *_labels(variant),
            f"{correct:.0%}",
            f"{equal:.0%}",
            f"{drafts.acceptance_rate:.0%}",
        )

    return Grid(
        title=f"Facts found in long prompts by the demo model, {questions} questions per length",
        columns=("prompt tokens", "selected", "correct", "equal to full", "drafts accepted"),
        rows=tuple(row(variant) for variant in all_variants),
    )


def measure_latency(checkpoint: Checkpoint, repetitions: int) -> Grid:
    """Measure the first token of a large target with a small draft model."""
    target = large_target()
    bench = Bench(replace(checkpoint, target=target, head=None), checkpoint.target, draft_tokens=0)
    all_variants = variants()
    for number in track(range(repetitions), "Timing a large target"):
        for variant in all_variants:
            prompt = held_out.fact_prompts(repetitions, variant.prompt_tokens, seed=3)[number]
            variant.answers.append(bench.answer(prompt.messages, variant.options, 1))
    full_s = {
        variant.prompt_tokens: _min_s(variant, lambda answer: answer.ttft_s)
        for variant in all_variants
        if variant.options is IN_FULL
    }

    def row(variant: Variant) -> tuple[str, ...]:
        ttft_s = _min_s(variant, lambda answer: answer.ttft_s)
        scoring_s = _min_s(variant, lambda answer: answer.scoring_s)
        return (
            *_labels(variant),
            f"{1e3 * ttft_s:.0f}",
            f"{1e3 * scoring_s:.0f}" if scoring_s else MISSING,
            f"{full_s[variant.prompt_tokens] / ttft_s:.2f}",
        )

    ratio = _parameters(target) / _parameters(checkpoint.target)
    return Grid(
        title=f"First token of a target {ratio:.0f} times as large as its draft model",
        columns=("prompt tokens", "selected", "first token, ms", "draft only, ms", "speedup"),
        rows=tuple(row(variant) for variant in all_variants),
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


def _labels(variant: Variant) -> tuple[str, str]:
    share = variant.options.keep_share
    return str(variant.prompt_tokens), "in full" if share is None else f"{share:.0%}"


def _min_s(variant: Variant, time_of: Callable[[TimedAnswer], float]) -> float:
    """Return the minimum of all repetitions: other processes only add time."""
    return min(time_of(answer) for answer in variant.answers)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.spec_prefill", description=__doc__
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of the demo model")
    parser.add_argument(
        "--questions", type=int, default=40, help="questions for each prompt length"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="timings at each length")
    options = parser.parse_args(arguments)
    checkpoint = load_checkpoint(options.model)
    grids = (
        measure_quality(checkpoint, options.questions),
        measure_latency(checkpoint, options.repetitions),
    )
    console = Console(highlight=False)
    for grid in grids:
        console.print(grid.to_table())
    metadata = f"{provenance()}, MLX {version('mlx')}. Greedy answers; the demo model is the draft."
    noise = (
        "A full prefill and 100% selected are the same work: the difference of their times is "
        "the noise."
    )
    write_page(RESULTS / "spec_prefill.md", "SpecPrefill", metadata, noise, *grids)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.spec_prefill")
    main()
