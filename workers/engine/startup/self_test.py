"""Self-test of the MTP head and warm-up of the lanes, before the worker serves requests.

A wrongly converted head never fails, it only never helps, and users see no speed-up and no reason.
A few greedy answers to everyday questions separate a healthy head (60 to 90 % of first draft tokens
accepted) from a broken one (almost none).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.protocol import Speculation
from paceline.request.profile import Bypass, Sampling
from workers.engine.decode.row import EventSink, Row
from workers.engine.decode.step_graph import StepGraph
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.startup.head_speed import Restore
from workers.engine.text.detokenizer import TextStream
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import (
    EngineError,
    Event,
    Finished,
    Generation,
    InvalidGeneration,
    ModelUnusable,
    Prompt,
)

logger = logging.getLogger(__name__)

QUESTIONS = (
    "Count from 1 to 40.",
    "Tell me a story about a dragon.",
    "What is the capital of France?",
    "Write a list of the days of the week.",
)
ANSWER_TOKENS = 64
MIN_ACCEPTANCE = 0.2
"""Share of first draft tokens: the worst healthy heads reach 0.5, a random one almost none."""
MIN_STEPS = 16
"""Fewer steps prove nothing: a model may answer in one word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadHealth:
    """Result of the self-test."""

    first_token_acceptance: float
    steps: int
    failures: int = 0
    """Answers in which the head raised an error."""
    answers: tuple[int, ...] = ()
    """Tokens of the answers."""

    @property
    def healthy(self) -> bool:
        """Return whether the head may draft."""
        accurate = self.steps < MIN_STEPS or self.first_token_acceptance >= MIN_ACCEPTANCE
        return accurate and not self.failures

    @property
    def description(self) -> str:
        """Return the result as a sentence, with the likely causes."""
        if self.failures:
            return (
                f"MTP head unhealthy: it failed in {self.failures} answers of the self-test; "
                "the lane runs without it. Check the log for the error, and the checkpoint: its "
                "tensors may be missing, or belong to another model size or revision."
            )
        share = (
            f"{self.first_token_acceptance:.0%} of {self.steps} first draft tokens were accepted"
        )
        if self.healthy:
            return f"MTP head healthy: {share}."
        return (
            f"MTP head unhealthy: only {share}; the lane runs without it. Check the checkpoint: "
            "RMSNorm weights of the head may be off by one (converted twice, or not at all), its "
            "tensors may be missing or random, or the head may belong to another model size or "
            "revision, or be quantised too far (8 bits are enough for a healthy head)."
        )


Progress = Callable[[int, int], None]
"""Is called with the number of answers so far, and of all."""


def settle_head(
    graph: StepGraph,
    make_lane: Callable[[], LaneScheduler],
    prompts: PromptRenderer,
    progress: Progress,
    restore: Restore | None,
) -> HeadHealth:
    """Test the head of a graph, and decide with which weights and shortlist it drafts.

    One that fails is tested again with its own weights and over the whole vocabulary. A healthy one
    loses only its shortlist, if that does not pay. `restore` gives it its own weights back; None
    if it has them.
    """
    head = graph.head
    assert head is not None
    health, shortlist = check_head(make_lane(), prompts, progress), head.shortlist
    if health.healthy:
        if shortlist and not shortlist.settle(health.first_token_acceptance, health.answers):
            head.shortlist = None
    elif restore or shortlist:
        head.shortlist = None
        if restore is not None:
            restore()
        graph.forget()
        health = check_head(make_lane(), prompts, progress)
    logger.info("mtp_head.tested %s", health.description)
    return health


def check_head(
    lane: LaneScheduler, prompts: PromptRenderer, progress: Progress = lambda *_: None
) -> HeadHealth:
    """Answer a few questions on a lane without clients; runs on the engine thread."""
    ends: list[Finished | EngineError] = []

    def record(event: Event | EngineError) -> None:
        if isinstance(event, Finished | EngineError):
            ends.append(event)
            progress(len(ends), len(QUESTIONS))

    progress(0, len(QUESTIONS))
    rows = [
        greedy_row(lane, prompts, chat_prompt(prompts, question), draft_tokens=1, sink=record)
        for question in QUESTIONS
    ]
    for row in rows:
        lane.add(row)
    while lane.busy:
        lane.step()
    counts = sum((row.speculation.total() for row in rows), Speculation())
    first = counts.accepted_per_position[0] if counts.steps else 0
    return HeadHealth(
        first_token_acceptance=first / counts.steps if counts.steps else 0.0,
        steps=counts.steps,
        failures=lane.counters.report().bypass_counts.get(Bypass.HEAD_UNHEALTHY, 0),
        answers=tuple(token for row in rows for token in row.answer),
    )


def warm_up(
    lane: LaneScheduler,
    prompts: PromptRenderer,
    max_draft_tokens: int,
    progress: Progress = lambda *_: None,
) -> None:
    """Run every kind of step once, with one row and with several, to compile its kernels.

    MLX compiles a kernel at its first use; on Linux that takes a C++ compiler and seconds.
    Raises `ModelUnusable` if no question was answered.
    """
    ends: list[object] = []
    for draft_tokens in range(max_draft_tokens + 1):
        progress(draft_tokens, max_draft_tokens + 1)
        for question in QUESTIONS[:2]:
            row = greedy_row(
                lane, prompts, chat_prompt(prompts, question),
                draft_tokens=draft_tokens, max_tokens=2 * (draft_tokens + 2), sink=ends.append,
            )  # fmt: skip
            lane.add(row)
        while lane.busy:
            lane.step()
    if lane.looks_up and not lane.has_head:
        _warm_up_lookup(lane, prompts, max_draft_tokens)
    if not any(isinstance(end, Finished) for end in ends):
        raise ModelUnusable(
            "The model loads but cannot answer: every question of the warm-up failed. The log "
            "has the errors; Paceline may not support the model's family."
        )


def _warm_up_lookup(lane: LaneScheduler, prompts: PromptRenderer, draft_tokens: int) -> None:
    """Run a verify without a head; text that repeats itself makes a lookup likely."""
    prompt = Prompt(text=f"{QUESTIONS[0]}\n" * 4)
    row = greedy_row(lane, prompts, prompt, draft_tokens=draft_tokens, max_tokens=ANSWER_TOKENS)
    row.looks_up = True
    lane.add(row)
    while lane.busy and not row.speculation.steps:
        lane.step()
    row.cancelled = True
    while lane.busy:
        lane.step()


def chat_prompt(prompts: PromptRenderer, question: str) -> Prompt:
    """Return the prompt of a question; nothing of it is cached."""
    try:
        text = prompts.chat([{"role": "user", "content": question}])
    except InvalidGeneration:  # a base model has no chat template
        text = question
    return Prompt(text=text, scope=None)


def greedy_row(
    lane: LaneScheduler,
    prompts: PromptRenderer,
    prompt: Prompt,
    *,
    draft_tokens: int = 0,
    max_tokens: int = ANSWER_TOKENS,
    sink: EventSink = lambda _: None,
    **options: Any,
) -> Row:
    """Return a row without a client; `options` are further fields of its generation."""
    greedy = Sampling(temperature=0)
    generation = Generation(
        request_id="self-test", lane=lane.name, prompt=prompt, sampling=greedy, **options
    )
    return Row(
        generation=generation,
        prompt=prompts.prepare(prompt),
        seed=0,
        max_tokens=max_tokens,
        ends=lane.ends,
        draft_tokens=draft_tokens,
        draft_tokens_fixed=True,
        with_head=lane.has_head,
        text=TextStream(prompts.decode),
        sink=sink,
    )
