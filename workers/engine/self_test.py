"""Does the MTP head guess what its model says? Asked once, before anybody else is served.

A head that was converted wrongly never fails, it only never helps; users then see no speed-up and
no reason. A few greedy answers to everyday questions tell a sound head (60 to 90 % of first guesses
right) from a broken one (next to none).
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.request.profile import Bypass, Sampling
from workers.engine.detokenizer import TextStream
from workers.engine.row import EventSink, Row, SpeculationCounter
from workers.engine.scheduler import LaneScheduler
from workers.engine.tokenizer import PromptRenderer
from workers.engine.types import Finished, Generation, InvalidGeneration, ModelUnusable, Prompt
from workers.protocol import Speculation

QUESTIONS = (
    "Count from 1 to 40.",
    "Tell me a story about a dragon.",
    "What is the capital of France?",
    "Write a list of the days of the week.",
)
ANSWER_TOKENS = 64
MIN_ACCEPTANCE = 0.2
"""Of first guesses. Chance is one in the vocabulary; the worst sound heads reported reach 0.5."""
MIN_STEPS = 16
"""Fewer judge nothing: a model that answers in a word is not a sick head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadHealth:
    """What the self-test found."""

    first_token_acceptance: float
    steps: int
    failures: int = 0
    """Answers that went on without the head, since it had raised."""

    @property
    def healthy(self) -> bool:
        """Say whether the head may draft."""
        right = self.steps < MIN_STEPS or self.first_token_acceptance >= MIN_ACCEPTANCE
        return right and not self.failures

    @property
    def description(self) -> str:
        """Say to people what was found and what to look at."""
        if self.failures:
            return (
                f"MTP head unhealthy: it failed in {self.failures} answers of the self-test; "
                "the lane serves without it. Look at the log for what it raised, and at the "
                "checkpoint: mtp.* tensors missing, or of another model size or revision."
            )
        share = f"{self.first_token_acceptance:.0%} of {self.steps} first guesses were right"
        if self.healthy:
            return f"MTP head sound: {share}."
        return (
            f"MTP head unhealthy: only {share}; the lane serves without it. "
            "Look at the checkpoint: RMSNorm weights of mtp.* off by one (converted twice, or not "
            "at all), mtp.* tensors missing or left at random, a head of another model size or "
            "revision, or a head quantised too far (keep it in bfloat16)."
        )


def check_head(lane: LaneScheduler, prompts: PromptRenderer) -> HeadHealth:
    """Answer a few questions on a lane of the test's own; must run on the engine thread."""
    rows = [_row(lane, prompts, question, 1, ANSWER_TOKENS) for question in QUESTIONS]
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
    )


def warm_up(lane: LaneScheduler, prompts: PromptRenderer, longest_draft: int) -> None:
    """Run every kind of round once, alone and in company, before anybody waits for one.

    MLX compiles a kernel when it is first used; on Linux that takes a C++ compiler, and seconds.
    Raises `ModelUnusable` if not one question was answered.
    """
    ends: list[object] = []
    for draft_tokens in range(longest_draft + 1):
        for question in QUESTIONS[:2]:
            max_tokens = 2 * (draft_tokens + 2)
            lane.add(_row(lane, prompts, question, draft_tokens, max_tokens, sink=ends.append))
        while lane.busy:
            lane.step()
    if not any(isinstance(end, Finished) for end in ends):
        raise ModelUnusable(
            "The model loads but cannot answer: every question asked at the start failed, and the "
            "log says with what; its family may be one that Paceline cannot serve."
        )


def _row(
    lane: LaneScheduler,
    prompts: PromptRenderer,
    question: str,
    draft_tokens: int,
    max_tokens: int,
    *,
    sink: EventSink = lambda _: None,
) -> Row:
    try:
        text = prompts.chat([{"role": "user", "content": question}])
    except InvalidGeneration:  # a base model has no chat template
        text = question
    greedy = Sampling(temperature=0)
    prompt = Prompt(text=text)
    return Row(
        generation=Generation(
            request_id="self-test", lane=lane.name, prompt=prompt, sampling=greedy
        ),
        prompt=prompts.prepare(prompt),
        seed=0,
        max_tokens=max_tokens,
        draft_tokens=draft_tokens,
        draft_tokens_fixed=True,
        text=TextStream(prompts.decode),
        speculation=SpeculationCounter(draft_tokens),
        sink=sink,
    )
