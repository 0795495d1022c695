"""What one checkpoint does in the engine, checked token by token against a bare pass and mlx-lm.

Prompts of several lengths are answered alone and in company, with drafts, and again as the next
turn of a conversation. Each token of each answer must be the likeliest of a pass over all tokens
before it, of mlx-vlm's model and of mlx-lm's, unless another one is as likely within `TIE`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from paceline.protocol import DraftSource
from tests.support.engine_lane import lanes_of, row_for
from workers.engine.decode.row import Row
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.target import CompiledPasses
from workers.engine.model.windows import FamilyWindow, window_tokens
from workers.engine.startup.probes import (
    probe_compiled_passes,
    probe_native_verify,
    probe_shared_rows,
)
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import Finished, LaneName

TIE: Final = 1e-3
"""Two scores that are closer are a tie, which the order of summation may decide either way."""
DRAFT_TOKENS: Final = 4
TURN_TOKENS: Final = 20
"""New tokens of a second turn."""
_CHUNK_TOKENS: Final = 64
_FIRST_TEXT_TOKEN: Final = 64
"""Tokens before it are marks of the tokenizer."""


@dataclass(slots=True, kw_only=True)
class Checks:
    """What a checkpoint does, and what went wrong."""

    compiles: CompiledPasses
    """Which passes are compiled."""
    batches: bool = False
    """Whether rows share a pass."""
    most_rows: int = 0
    """Rows that decoded in one batch."""
    window_tokens: int = 0
    """Largest window; 0 without any."""
    longest_prompt: int = 0
    tokens: int = 0
    """Tokens of answers, each checked."""
    ties: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_head: int = 0
    accepted_by_head: int = 0
    cached_tokens: int = 0
    """Prompt tokens of second turns that the prefix cache had."""
    prompt_tokens: int = 0
    """All prompt tokens of second turns."""
    compared_with_mlx_lm: bool = False
    context_tokens: int = 0
    mtp: bool = False
    duration_s: float = 0.0
    problems: list[str] = field(default_factory=list)


def load_target(folder: Path, mtp: Path | None = None, *, compiled: bool = False) -> Checkpoint:
    """Load a checkpoint, and probe it as the engine does; `mtp` is the folder of its head.

    With `compiled` its passes are compiled where they can be, as on a GPU.
    """
    checkpoint = load_checkpoint(folder, mtp=mtp)
    target = checkpoint.target
    if target.supports_batching and not target.explicit_positions:
        target.supports_batching = probe_shared_rows(target)
    target.native_verify = target.supports_batching and probe_native_verify(target)
    if compiled and target.supports_batching:
        target.compiles = probe_compiled_passes(target)
    # Random weights end an answer anywhere, and their answers shall all be long.
    return replace(checkpoint, eos=frozenset())


def check_checkpoint(
    folder: Path,
    *,
    prompt_lengths: Sequence[int] = (40, 130),
    answer_tokens: int = 12,
    mlx_lm: bool = True,
    mtp: Path | None = None,
    compiled: bool = False,
) -> Checks:
    """Answer prompts of these lengths in every way, and check each token."""
    started_s = time.perf_counter()
    checkpoint = load_target(folder, mtp, compiled=compiled)
    runner = _Runner(checkpoint, answer_tokens)
    checks = runner.checks
    prompts = [_prompt(length, seed) for seed, length in enumerate(prompt_lengths)]
    checks.longest_prompt = max(prompt_lengths) + answer_tokens
    alone = [runner.answer([prompt]).answers[0] for prompt in prompts]
    together = runner.answer(prompts)
    checks.most_rows = together.most_rows
    for prompt, one, other in zip(prompts, alone, together.answers, strict=True):
        runner.check(prompt, one)
        if other != one:
            runner.check(prompt, other)
    turns = [
        [*prompt, *answer, *_prompt(TURN_TOKENS, seed)]
        for seed, (prompt, answer) in enumerate(zip(prompts, together.answers, strict=True))
    ]
    again = runner.answer(turns)
    checks.cached_tokens, checks.prompt_tokens = again.cached_tokens, sum(map(len, turns))
    for prompt, answer in zip(turns, again.answers, strict=True):
        runner.check(prompt, answer)
    if mlx_lm:
        _compare_with_mlx_lm(folder, checks, [*zip(prompts, alone, strict=True)])
    checks.duration_s = time.perf_counter() - started_s
    return checks


@dataclass(frozen=True, slots=True)
class _Answers:
    answers: list[list[int]]
    most_rows: int
    cached_tokens: int


class _Runner:
    """A lane of the engine on one checkpoint, and the counts of what it has answered."""

    def __init__(self, checkpoint: Checkpoint, answer_tokens: int) -> None:
        self.checks = Checks(
            batches=checkpoint.target.supports_batching,
            compiles=checkpoint.target.compiles,
            context_tokens=checkpoint.context_tokens,
            mtp=checkpoint.head is not None,
            window_tokens=max(
                (
                    window_tokens(cache)
                    for cache in checkpoint.target.new_caches()
                    if isinstance(cache, FamilyWindow)
                ),
                default=0,
            ),
        )
        self._target = checkpoint.target
        self._answer_tokens = answer_tokens
        self._prompts = PromptRenderer(checkpoint.processor)
        (self._lane,) = lanes_of(
            checkpoint,
            self._prompts,
            LaneName.TEXT_MTP,
            draft_tokens=DRAFT_TOKENS,
            max_rows=4,
            cache=1 << 30,
            chunk_tokens=_CHUNK_TOKENS,
        )

    def answer(self, prompts: Sequence[Sequence[int]]) -> _Answers:
        ends: list[object] = []
        rows = [self._row(prompt, ends) for prompt in prompts]
        for row in rows:
            self._lane.add(row)
        most_rows = 0
        while self._lane.busy:
            self._lane.step()
            most_rows = max(most_rows, *map(len, self._lane.rows_by_batch()), 0)
        problems = [repr(end) for end in ends if not isinstance(end, Finished)]
        self.checks.problems += problems
        for row in rows:
            counts = row.speculation.total()
            self.checks.drafted += counts.drafted
            self.checks.accepted += counts.accepted
            self.checks.drafted_by_head += counts.drafted_by_source.get(DraftSource.HEAD, 0)
            self.checks.accepted_by_head += counts.accepted_by_source.get(DraftSource.HEAD, 0)
        cached = sum(row.cached_tokens for row in rows)
        return _Answers([list(row.answer) for row in rows], most_rows, cached)

    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Check each token of an answer against one pass of the bare model."""
        tokens = [*prompt, *answer[:-1]]
        positions = mx.arange(len(tokens), dtype=mx.int32)[None]
        output = self._target.forward(mx.array([tokens]), self._target.new_caches(), positions)
        scores = self._target.scores(output)[0, len(prompt) - 1 :]
        ties = _count_ties(scores, answer, "mlx-vlm", self.checks)
        self.checks.ties += ties
        self.checks.tokens += len(answer)

    def _row(self, tokens: Sequence[int], ends: list[object]) -> Row:
        def sink(event: object) -> None:
            if isinstance(event, Finished | Exception):
                ends.append(event)

        prompt = PreparedPrompt(tokens=tuple(tokens), scope="", turn_tokens=len(tokens) - 4)
        return row_for(
            self._lane,
            self._prompts,
            prompt,
            DRAFT_TOKENS,
            self._answer_tokens,
            with_head=self._lane.has_head,
            looks_up=True,
            sink=sink,
        )


def _count_ties(scores: mx.array, answer: Sequence[int], who: str, checks: Checks) -> int:
    """Return how many tokens of an answer are ties; note the first that is not the likeliest."""
    scores = scores.astype(mx.float32)
    chosen = mx.take_along_axis(scores, mx.array(answer)[:, None], axis=1)[:, 0]
    behind = (scores.max(axis=1) - chosen).tolist()
    scale = max(1.0, float(mx.abs(scores).max().item()))
    at = next((at for at, gap in enumerate(behind) if not gap <= TIE * scale), None)
    if at is not None:
        checks.problems.append(
            f"token {at} of an answer is {behind[at]:.4f} behind the likeliest of {who}"
        )
    return sum(gap > 0 for gap in behind)


def _compare_with_mlx_lm(
    folder: Path, checks: Checks, answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> None:
    from mlx_lm.utils import load_model  # noqa: PLC0415 - only where it is compared

    model: Any = load_model(folder)[0]
    if mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)
    for prompt, answer in answers:
        tokens = mx.array([[*prompt, *answer[:-1]]])
        scores = model(tokens, cache=None)[0, len(prompt) - 1 :]
        _count_ties(scores, answer, "mlx-lm", checks)
    checks.compared_with_mlx_lm = True


def _prompt(length: int, seed: int) -> list[int]:
    """Return random tokens of which a part repeats, so that prompt lookup finds drafts."""
    chance = random.Random(seed)
    part = [chance.randrange(_FIRST_TEXT_TOKEN, 1500) for _ in range(max(length // 3, 4))]
    tokens = (part * 4)[: length - 2]
    return [*tokens, *part[:2]]
