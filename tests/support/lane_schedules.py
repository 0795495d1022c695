"""Random schedules of a lane, each row replayed alone and each of its tokens explained.

Rows join at any step, leave at any step, are stopped by a string, the end token or their limit
inside a draft or outside, name a k or take the lane's, are greedy, sampled or penalised, start from
prefix_cache or not; now and then the MTP head raises. Whatever happens beside a row, its answer is
that of its prompt alone, and its counts add up with every step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from policies.request.profile import Sampling
from tests.support.reference_decoder import is_near_tie, reference_decode
from tests.support.schedule_rows import FailingHead, ScheduledRow, ScheduleStats
from workers.engine.detokenizer import TextStream
from workers.engine.memory import MemoryEstimate
from workers.engine.metrics import LaneCounters
from workers.engine.model import Checkpoint
from workers.engine.prefill_budget import PrefillBudget
from workers.engine.prefix_cache import PrefixCache
from workers.engine.row import Row, SpeculationCounter
from workers.engine.sampler import SamplingContext, choose
from workers.engine.scheduler import LaneScheduler
from workers.engine.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import Finished, FinishReason, Generation, LaneName, Prompt
from workers.protocol import LaneReport

LONGEST_ANSWER = 40
GREEDY = Sampling(temperature=0)
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
    {"draft_tokens": 1, "max_rows": 8, "chunk_tokens": 512, "prefix_cache_bytes": 0},
    {"draft_tokens": 2, "max_rows": 2, "chunk_tokens": 32, "prefix_cache_bytes": 1 << 30},
    {"draft_tokens": 3, "max_rows": 5, "chunk_tokens": 64, "prefix_cache_bytes": 1 << 20},
    {"draft_tokens": 4, "max_rows": 8, "chunk_tokens": 512, "prefix_cache_bytes": 1 << 30},
)


class ScheduleRunner:
    """Plays schedules on a few lanes, one after another; `stats` says what happened in them."""

    def __init__(
        self, checkpoint: Checkpoint, prompts: PromptRenderer, seed: int, variety: int = 1
    ) -> None:
        """Draw `variety` prompts of each length; a replay of each costs as much as a schedule."""
        self.stats = ScheduleStats()
        self._checkpoint = checkpoint
        self._prompts = prompts
        self._seed = seed
        rng = random.Random(seed)
        lengths = (1, 2, 7, 30, 90, 200)
        self._pool = [
            PreparedPrompt(tokens=tuple(rng.randrange(20, 1000) for _ in range(length)))
            for length in lengths * variety
        ]
        self._pool += [self._chat(system, ask) for system in ("", *SYSTEMS) for ask in QUESTIONS]
        self._alone: dict[tuple[object, ...], list[int]] = {}
        self._heads: list[FailingHead] = []
        self._lanes = [self._make_lane(**settings) for settings in SETTINGS]

    def run(self, number: int) -> None:
        """Play one schedule to its end; an AssertionError names what was not as it must be."""
        rng = random.Random(f"{self._seed} {number}")
        index = rng.randrange(len(self._lanes))
        if not self._lanes[index].counters.head_healthy:
            self._lanes[index] = self._make_lane(**SETTINGS[index], index=index)
        lane, head = self._lanes[index], self._heads[index]
        before = lane.counters.report()
        head.calls_left = rng.randrange(12) if rng.random() < 0.25 else None
        asked: list[ScheduledRow] = []
        to_come, eagerness = rng.randint(1, 12), rng.choice([0.1, 0.4, 1.0])
        while to_come or lane.busy:
            while to_come and rng.random() < eagerness:
                to_come -= 1
                asked.append(self._ask(lane, rng))
            running = [one for one in asked if one.end is None and not one.row.cancelled]
            if running and rng.random() < 0.02:
                rng.choice(running).row.cancelled = True
            lane.step()
            for one in asked:
                one.check_step()
        head.calls_left = None
        for one in asked:
            self._check(one)
        self._check_sums(before, lane.counters.report(), asked)
        self.stats.schedules += 1

    def _check(self, one: ScheduledRow) -> None:
        row, found = one.row, self.stats
        answer = row.answer
        alone, text, reason = self._expected(one)
        if row.cancelled and one.end is None:
            found.cancelled += 1
            alone = alone[: len(answer)]
        else:
            assert isinstance(one.end, Finished), one.end
        if answer == alone:
            if one.end is not None:
                assert (one.text, one.end.reason) == (text, reason)
        else:
            assert row.generation.sampling == GREEDY, "a row with rules parted from its replay"
            assert is_near_tie(self._checkpoint, row.prompt.tokens, answer, alone)
            found.near_ties += 1
        found.rows += 1
        found.with_rules += row.generation.sampling != GREEDY
        found.ended_by_limit += row.finish_reason is FinishReason.LENGTH
        found.ended_by_string += row.text.stopped
        found.ended_by_token += row.finish_reason is FinishReason.STOP and not row.text.stopped
        found.ended_inside_a_draft += one.inside
        found.from_prefix_cache += row.cached_tokens > 0
        found.without_head += one.k > 0 == row.draft_tokens
        found.tokens += len(answer)
        found.speculation += row.speculation.total()

    def _check_sums(
        self, before: LaneReport, after: LaneReport, asked: Sequence[ScheduledRow]
    ) -> None:
        rows = [one.row for one in asked]
        assert after.requests - before.requests == len(rows)
        assert after.completion_tokens - before.completion_tokens == sum(
            len(row.answer) for row in rows
        )
        total = sum((row.speculation.total() for row in rows), before.speculation)
        assert after.speculation == total
        assert (after.running, after.waiting) == (0, 0)

    def _expected(self, one: ScheduledRow) -> tuple[list[int], str, FinishReason]:
        """Return what the row's rules make of the answer to its prompt alone."""
        stream = TextStream(self._prompts.decode, one.stop)
        taken: list[int] = []
        text = ""
        for token in self._replay(one.row):
            taken.append(token)
            if token in self._checkpoint.eos:
                return taken, text + stream.flush(), FinishReason.STOP
            text += stream.push(token)
            if stream.stopped:
                return taken, text, FinishReason.STOP
            if len(taken) == one.row.max_tokens:
                return taken, text + stream.flush(), FinishReason.LENGTH
        raise AssertionError("the replay is longer than any limit")

    def _replay(self, row: Row) -> list[int]:
        sampling, prompt = row.generation.sampling, row.prompt.tokens
        key = (prompt,) if sampling == GREEDY else (prompt, sampling, row.seed)
        if key not in self._alone:

            def pick(scores: mx.array, answer: Sequence[int]) -> int:
                rules = SamplingContext(
                    sampling=sampling,
                    seed=row.seed,
                    position=len(answer),
                    prompt=prompt,
                    answer=answer,
                )
                return int(choose(scores, [rules]).item())

            self._alone[key] = reference_decode(self._checkpoint, prompt, LONGEST_ANSWER, pick)
        return self._alone[key]

    def _ask(self, lane: LaneScheduler, rng: random.Random) -> ScheduledRow:
        plain = rng.random() < 0.7
        row = Row(
            generation=Generation(
                request_id="schedule",
                lane=lane.name,
                prompt=Prompt(text=""),
                sampling=GREEDY if plain else rng.choice(RULES),
            ),
            prompt=rng.choice(self._pool),
            seed=rng.randrange(2),
            max_tokens=rng.randint(1, LONGEST_ANSWER),
            draft_tokens=rng.randint(0, 4),
            draft_tokens_fixed=rng.random() < 0.8,
            text=TextStream(self._prompts.decode),
            speculation=SpeculationCounter(0),
            sink=lambda _: None,
        )
        row.speculation = SpeculationCounter(row.draft_tokens)
        stop: tuple[str, ...] = ()
        if rng.random() < 0.3:
            piece = rng.choice(self._replay(row))
            stop = (self._prompts.decode([piece]).strip() or " ",)
            row.text = TextStream(self._prompts.decode, stop)
        asked = ScheduledRow(row=row, stop=stop, k=row.draft_tokens)
        row.sink = asked.on_event
        lane.add(row)
        return asked

    def _chat(self, system: str, question: str) -> PreparedPrompt:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        return self._prompts.prepare(
            Prompt(
                text=self._prompts.chat(messages),
                prefix_text=self._prompts.shared_prefix(messages),
            )
        )

    def _make_lane(
        self,
        *,
        draft_tokens: int,
        max_rows: int,
        chunk_tokens: int,
        prefix_cache_bytes: int,
        index: int | None = None,
    ) -> LaneScheduler:
        head = FailingHead(self._checkpoint.head)
        if index is None:
            self._heads.append(head)
        else:
            self._heads[index] = head
        return LaneScheduler(
            LaneName.TEXT_MTP,
            replace(self._checkpoint, head=head),  # type: ignore[arg-type]  # it behaves like one
            self._prompts,
            LaneCounters(LaneName.TEXT_MTP, slots=max_rows, draft_tokens=draft_tokens),
            prefix_cache=PrefixCache(prefix_cache_bytes),
            draft_tokens=draft_tokens,
            max_rows=max_rows,
            prefill_budget=PrefillBudget(chunk_tokens, budget_s=60.0),
            memory=MemoryEstimate(token_bytes=1, row_bytes=1, room_bytes=1 << 30),
        )
