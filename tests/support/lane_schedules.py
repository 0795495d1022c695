"""Random schedules of a lane: each row is compared with a replay, and each step is counted.

Rows join and leave at any step, end at a stop string, the end token or their limit inside a draft
or outside, name a draft length or use that of the lane, are greedy, sampled or penalised, and start
from a cached prefix or not; sometimes the MTP head raises an error. The answer of every row must be
that of its prompt alone, and its counts must add up after every step.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from paceline.protocol import LaneReport, Speculation
from paceline.request.profile import Sampling
from tests.support.engine_lane import GREEDY, RowEvents, lanes_of, row_for
from tests.support.failing_model import FailingPart
from tests.support.reference_decoder import is_near_tie, reference_decode
from workers.engine.decode.draft_length import RUN_LENGTHS
from workers.engine.decode.row import Row
from workers.engine.decode.sampler import SamplingContext, choose
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.text.detokenizer import TextStream
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import Finished, FinishReason, LaneName, Prompt

MAX_ANSWER_TOKENS = 40
RULES = (
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=1.3, top_k=40, presence_penalty=0.7),
    Sampling(temperature=0, repetition_penalty=1.5, frequency_penalty=1.5),
)
QUESTIONS = ("Hello", "Count from 1 to 20.", "Tell me a story about a fox.", "Name three fruits.")
SYSTEMS = (
    "Be brief. " + "The blue boat finds the warm stone. " * 4,
    "You are a help desk. " + "The red fox sees the old tree. " * 9,
)
SETTINGS = (
    {"draft_tokens": 1, "max_rows": 8, "chunk_tokens": 512, "cache": 0},
    {"draft_tokens": 2, "max_rows": 2, "chunk_tokens": 32, "cache": 1 << 30},
    {"draft_tokens": 3, "max_rows": 5, "chunk_tokens": 64, "cache": 1 << 20},
    {"draft_tokens": 4, "max_rows": 8, "chunk_tokens": 512, "cache": 1 << 30},
)


@dataclass(eq=False, kw_only=True)
class ScheduledRow(RowEvents):
    """A row of a schedule, with its counts after the last step."""

    stop: tuple[str, ...]
    k: int
    """Tokens that the head drafts."""
    longest: int
    """The longest draft."""
    last_tokens: int = 0
    last: Speculation = field(default_factory=Speculation)
    ended_in_draft: bool = False

    def check_step(self) -> None:
        """Check that the counts of the last step add up."""
        total = self.row.speculation.total()
        new = len(self.row.answer) - self.last_tokens
        if self.last_tokens == 0 and new:
            new -= 1  # the prefill chose it, and no step
        steps, errors = total.steps - self.last.steps, total.errors - self.last.errors
        drafted, accepted = total.drafted - self.last.drafted, total.accepted - self.last.accepted
        new_steps = self.row.speculation.steps[self.last.steps :]
        self.last_tokens, self.last = len(self.row.answer), total
        assert total.drafted == total.accepted + total.rejected + total.errors
        assert sum(total.histogram) == total.steps
        assert sum(count * n for count, n in enumerate(total.histogram)) == total.accepted
        assert errors <= self.longest
        assert new or not errors or not steps, "a step that failed alone has added nothing"
        drafted -= errors  # the next step may fail before the host reads the one that succeeded
        if steps:
            assert new_steps == [(drafted, accepted)]
            assert 1 <= drafted <= self.longest
            assert sum(total.drafted_by_source.values()) == total.drafted
            assert sum(total.accepted_by_source.values()) == total.accepted
            assert accepted <= drafted
            self.ended_in_draft = bool(self.row.finish_reason) and new == accepted
            assert new == accepted + 1 or self.ended_in_draft
        else:
            assert (new_steps, accepted, drafted) == ([], 0, 0)
            assert new in (0, 1)


class ScheduleRunner:
    """Runner of schedules on a few lanes, one after another, with their statistics."""

    def __init__(
        self, checkpoint: Checkpoint, prompts: PromptRenderer, seed: int, variety: int = 1
    ) -> None:
        """Draw `variety` prompts of each length; a replay of each costs as much as a schedule."""
        self.stats: Counter[str] = Counter()
        """What the schedules covered, by the names in `bench.engine.schedules`."""
        self.speculation = Speculation()
        self._checkpoint = checkpoint
        self._prompts = prompts
        self._seed = seed
        rng = random.Random(seed)
        lengths = (1, 2, 7, 30, 90, 200)
        self._pool = [
            PreparedPrompt(tokens=tuple(rng.randrange(20, 1000) for _ in range(length)))
            for length in lengths * variety
        ]
        self._pool += [
            self._chat(system, question) for system in ("", *SYSTEMS) for question in QUESTIONS
        ]
        self._replays: dict[tuple[object, ...], list[int]] = {}
        self._calls_to_failure: int | None = None
        self._lanes = [self._make_lane(**settings) for settings in SETTINGS]

    def run(self, number: int) -> None:
        """Run one schedule to its end; raise `AssertionError` at the first difference."""
        rng = random.Random(f"{self._seed} {number}")
        index = rng.randrange(len(self._lanes))
        if not self._lanes[index].counters.head_healthy:
            self._lanes[index] = self._make_lane(**SETTINGS[index])
        lane = self._lanes[index]
        before = lane.counters.report()
        self._calls_to_failure = rng.randrange(12) if rng.random() < 0.25 else None
        schedule: list[ScheduledRow] = []
        remaining, join_probability = rng.randint(1, 12), rng.choice([0.1, 0.4, 1.0])
        while remaining or lane.busy:
            while remaining and rng.random() < join_probability:
                remaining -= 1
                schedule.append(self._submit(lane, rng))
            running = [one for one in schedule if one.end is None and not one.row.cancelled]
            if running and rng.random() < 0.02:
                rng.choice(running).row.cancelled = True
            lane.step()
            for scheduled in schedule:
                scheduled.check_step()
        self._calls_to_failure = None
        for scheduled in schedule:
            self._check(scheduled)
        self._check_sums(before, lane.counters.report(), schedule)
        self.stats["schedules"] += 1

    def _check(self, scheduled: ScheduledRow) -> None:
        row, stats = scheduled.row, self.stats
        answer = row.answer
        expected, text, reason = self._expected(scheduled)
        if row.cancelled and scheduled.end is None:
            stats["cancelled"] += 1
            expected = expected[: len(answer)]
        else:
            assert isinstance(scheduled.end, Finished), scheduled.end
        if answer == expected:
            if scheduled.end is not None:
                assert (scheduled.text, scheduled.end.reason) == (text, reason)
        else:
            assert row.generation.sampling == GREEDY, (
                "a row with sampling rules differs from its replay"
            )
            assert is_near_tie(self._checkpoint, row.prompt.tokens, answer, expected)
            stats["near ties"] += 1
        ended, by_string = row.finish_reason, row.text.stopped_by is not None
        stats.update(
            {
                "rows": 1,
                "with rules": row.generation.sampling != GREEDY,
                "ended by limit": ended is FinishReason.LENGTH,
                "ended by string": by_string,
                "ended by token": ended is FinishReason.STOP and not by_string,
                "ended in draft": scheduled.ended_in_draft,
                "from prefix cache": row.cached_tokens > 0,
                "without head": scheduled.k > 0 and not row.uses_head,
                "tokens": len(answer),
            }
        )
        self.speculation += row.speculation.total()

    def _check_sums(
        self, before: LaneReport, after: LaneReport, schedule: Sequence[ScheduledRow]
    ) -> None:
        rows = [scheduled.row for scheduled in schedule]
        assert after.requests - before.requests == len(rows)
        assert after.prompt_tokens - before.prompt_tokens == sum(
            len(row.prompt.tokens) for row in rows
        )
        assert after.completion_tokens - before.completion_tokens == sum(
            len(row.answer) for row in rows
        )
        total = sum((row.speculation.total() for row in rows), before.speculation)
        assert after.speculation == total
        assert (after.running, after.waiting) == (0, 0)

    def _expected(self, scheduled: ScheduledRow) -> tuple[list[int], str, FinishReason]:
        """Return the tokens, text and finish reason that the replay and the rules imply."""
        stream = TextStream(self._prompts.decode, scheduled.stop)
        tokens: list[int] = []
        text = ""
        for token in self._replay(scheduled.row):
            tokens.append(token)
            if token in self._checkpoint.eos:
                return tokens, text + stream.flush(), FinishReason.STOP
            text += stream.push(token)
            if stream.stopped_by is not None:
                return tokens, text, FinishReason.STOP
            if len(tokens) == scheduled.row.max_tokens:
                return tokens, text + stream.flush(), FinishReason.LENGTH
        raise AssertionError("the replay is longer than any limit")

    def _replay(self, row: Row) -> list[int]:
        sampling, prompt = row.generation.sampling, row.prompt.tokens
        key = (prompt,) if sampling == GREEDY else (prompt, sampling, row.seed)
        if key not in self._replays:

            def pick(scores: mx.array, answer: Sequence[int]) -> int:
                rules = SamplingContext(
                    sampling=sampling, seed=row.seed, prompt=prompt, answer=answer
                )
                return int(choose(scores, [rules]).item())

            self._replays[key] = reference_decode(self._checkpoint, prompt, MAX_ANSWER_TOKENS, pick)
        return self._replays[key]

    def _submit(self, lane: LaneScheduler, rng: random.Random) -> ScheduledRow:
        plain = rng.random() < 0.7
        row = row_for(
            lane,
            self._prompts,
            rng.choice(self._pool),
            rng.randint(0, 4),
            rng.randint(1, MAX_ANSWER_TOKENS),
            sampling=GREEDY if plain else rng.choice(RULES),
            seed=rng.randrange(2),
            draft_tokens_fixed=rng.random() < 0.8,
            looks_up=rng.random() < 0.5,
        )
        stop: tuple[str, ...] = ()
        if rng.random() < 0.3:
            piece = rng.choice(self._replay(row))
            stop = (self._prompts.decode([piece]).strip() or " ",)
            row.text = TextStream(self._prompts.decode, stop)
        longest = row.draft_tokens
        if longest and row.looks_up and not row.draft_tokens_fixed:
            longest = max(longest, *RUN_LENGTHS)
        scheduled = ScheduledRow(stop=stop, k=row.draft_tokens, longest=longest)
        scheduled.row, row.sink = row, scheduled.on_event
        lane.add(row)
        return scheduled

    def _head_fails(self, *_: object) -> bool:
        if self._calls_to_failure is None:
            return False
        self._calls_to_failure -= 1
        if self._calls_to_failure >= 0:
            return False
        self._calls_to_failure = None
        return True

    def _chat(self, system: str, question: str) -> PreparedPrompt:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        return self._prompts.prepare(
            Prompt(
                text=self._prompts.chat(messages), prefix_text=self._prompts.shared_prefix(messages)
            )
        )

    def _make_lane(self, **sizes: int) -> LaneScheduler:
        head = FailingPart(self._checkpoint.head, self._head_fails)
        checkpoint = replace(self._checkpoint, head=head)  # type: ignore[arg-type]  # as a head
        ticks = itertools.count(1_000_000).__next__  # all steps cost the same on any machine
        (lane,) = lanes_of(
            checkpoint,
            self._prompts,
            LaneName.TEXT_MTP,
            clock=ticks,
            **sizes,  # type: ignore[arg-type]
        )
        return lane
