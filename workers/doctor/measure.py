"""Measurements of a loaded model: rounds by k and rows, verify passes, reading, equal answers.

Rounds are those of the lane that serves requests. Verify passes are those of its step graph, so
that they are known for a family without an MTP head too. Every measurement has a share of the time;
what that does not suffice for is skipped, and the report says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import mlx.core as mx

from paceline.protocol import Speculation
from paceline.request.profile import Sampling
from workers.doctor.report import ROW_TOKENS, Equality, Report, Round, Verify
from workers.engine.decode.batch import states_of
from workers.engine.decode.row import Row
from workers.engine.decode.step_graph import StepGraph
from workers.engine.engine import Engine
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.model.target import Target
from workers.engine.startup.probes import batch_caches
from workers.engine.startup.self_test import QUESTIONS, chat_prompt, greedy_row
from workers.engine.types import (
    Delta,
    EngineError,
    Event,
    Prompt,
)

ROWS = (1, 2, 4, 8)
LENGTHS = (1, 2, 3, 5, 9)
"""Tokens of a verify pass: the draft lengths of the head, and those of prompt lookup."""
ANSWER_TOKENS = 48
_FURTHER_QUESTIONS = (
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "What is 17 + 25?",
    "List five animals, one per line.",
)
_ROUNDS = 16
_SAMPLES = 5
_CELL_S = 3.0
"""Limit of one cell of a table, once it has begun."""
_CONTEXT_TOKENS = 128
_READ_TOKENS = 2048
_READ_S = 8.0
_READ_SHARE = 0.125
"""Of the time for all measurements."""
_GREEDY = Sampling(temperature=0)
_ENDLESS = 1 << 20


class OutOfTime(Exception):
    """The time for all measurements is over."""


@dataclass(slots=True)
class Session:
    """A loaded model, and the time that is left to measure it."""

    engine: Engine
    until_s: float
    """When the time is over, by `clock`."""
    step: Callable[[str], None] = lambda _: None
    """Is called with the name of what is measured next."""
    clock: Callable[[], float] = time.perf_counter
    skipped: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def lane(self) -> LaneScheduler:
        """Return the lane that is measured."""
        return self.engine.lanes[0]

    @property
    def target(self) -> Target:
        """Return the model."""
        return self.engine.checkpoint.target

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Name what is measured; record it if the time is over before its end, or if it fails."""
        self.step(name)
        try:
            yield
        except OutOfTime:
            self.skipped.append(name)
        except EngineError as error:
            self.failures.append(f"The measurement of {name} failed: {error}")
        finally:
            self._clear()

    def check(self) -> None:
        """Raise `OutOfTime` if the time is over."""
        if self.clock() >= self.until_s:
            raise OutOfTime

    def _clear(self) -> None:
        for rows in self.lane.rows_by_batch():
            for row in rows:
                row.cancelled = True
        while self.lane.busy:
            self.lane.step()


@dataclass(slots=True)
class Answer:
    """The answer to one question."""

    row: Row = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    error: EngineError | None = None

    def receive(self, event: Event | EngineError) -> None:
        """Take an event of the row."""
        if isinstance(event, Delta):
            self.logprobs += [one.logprob for one in event.logprobs]
        elif isinstance(event, EngineError):
            self.error = event

    @property
    def done(self) -> bool:
        """Return whether the answer has ended."""
        return self.error is not None or self.row.finish_reason is not None


def steps_of(engine: Engine) -> int:
    """Return how many steps `measure_all` takes."""
    return 1 + len(ROWS) * (1 + _longest_draft(engine)) + len(ROWS) * len(LENGTHS) + 4


def measure_all(session: Session, report: Report) -> Report:
    """Return the report with all that the time suffices for."""
    found: dict[str, object] = {}
    with session.measuring("reading a prompt"):
        found["prefill_tokens_per_s"] = measure_reading(session)
    found["rounds"] = tuple(_measure_rounds(session))
    found["verifies"] = tuple(_measure_verifies(session))
    found |= _compare_answers(session)
    found |= {"skipped": tuple(session.skipped), "failures": tuple(session.failures)}
    return report.model_copy(update=found)


def measure_reading(session: Session) -> float:
    """Return how many tokens of a prompt the model reads in a second."""
    session.check()
    text = " ".join(f"{number} {QUESTIONS[number % len(QUESTIONS)]}" for number in range(400))
    tokens = session.engine.prompts.prepare(Prompt(text=text)).tokens
    limit = min(_READ_TOKENS, session.engine.card.context_tokens // 2)
    answer = _ask(session, Prompt(tokens=tokens[:limit]), max_tokens=1)
    begun_s, read = session.clock(), 0
    limit_s = min(_READ_S, (session.until_s - begun_s) * _READ_SHARE)
    while not answer.done and session.clock() - begun_s < limit_s:
        session.lane.step()
        read = next((one.read_count for one in session.lane.prefills), limit)
    return read / (session.clock() - begun_s)


def measure_round(session: Session, rows: int, k: int) -> Round:
    """Return the cost of a round with rows that draft k tokens, or raise `OutOfTime`."""
    session.check()
    lane, questions = session.lane, [QUESTIONS[at % len(QUESTIONS)] for at in range(rows)]
    prompts = [chat_prompt(session.engine.prompts, question) for question in questions]
    answers = [_ask(session, prompt, k=k, max_tokens=_ENDLESS, ends=False) for prompt in prompts]
    while lane.running_rows < rows and not any(answer.done for answer in answers):
        session.check()
        lane.step()
    lane.step()  # the first round after a join catches up
    costs_s: list[float] = []
    begun_s = session.clock()
    while len(costs_s) < _ROUNDS and lane.running_rows == rows:
        round_s = session.clock()
        lane.step()
        costs_s.append(session.clock() - round_s)
        if session.clock() - begun_s > _CELL_S:
            break
    if not costs_s:
        raise OutOfTime
    return Round(rows=rows, k=k, round_s=median(costs_s), samples=len(costs_s))


def measure_verify(session: Session, graph: StepGraph, rows: int, tokens: int) -> Verify:
    """Return the cost of one pass over the next tokens of each row."""
    session.check()
    lengths = [_CONTEXT_TOKENS] * rows
    states = states_of(batch_caches(session.target, lengths))
    offset = mx.array(lengths, dtype=mx.int32)
    following = mx.ones((rows, tokens), dtype=mx.int32)
    mx.eval(states)

    def run() -> float:
        begun_s = session.clock()
        result = graph.verify(following, states, offset, mx.zeros_like(offset))
        mx.eval(result.scores, result.layers)
        return session.clock() - begun_s

    run()  # compiles its kernels
    begun_s, costs_s = session.clock(), [run()]
    while len(costs_s) < _SAMPLES and session.clock() - begun_s < _CELL_S:
        costs_s.append(run())
    return Verify(rows=rows, tokens=tokens, pass_s=median(costs_s), samples=len(costs_s))


def compare(answers: Sequence[Answer], alone: Sequence[Answer], *, bits: bool = False) -> Equality:
    """Return how many answers equal those asked alone; with `bits`, their log-probabilities too."""
    pairs = list(zip(answers, alone, strict=True))
    differences = [
        _first_difference(one.row.answer, other.row.answer)
        for one, other in pairs
        if one.row.answer != other.row.answer
    ]
    same_bits = sum(
        one.row.answer == other.row.answer and one.logprobs == other.logprobs
        for one, other in pairs
    )
    return Equality(
        answers=len(pairs),
        equal=len(pairs) - len(differences),
        first_differences=tuple(differences),
        same_bits=same_bits if bits else None,
    )


def row_bytes(engine: Engine) -> int:
    """Return the memory of a row of `ROW_TOKENS` tokens, by the estimate of the engine."""
    return engine.admission.memory.row_cache_bytes(ROW_TOKENS)


def _measure_rounds(session: Session) -> Iterator[Round]:
    # Plain rounds of all sizes first: the others are compared with them.
    for k in range(_longest_draft(session.engine) + 1):
        for rows in ROWS:
            with session.measuring(f"rounds of {rows} with k = {k}"):
                yield measure_round(session, rows, k)


def _measure_verifies(session: Session) -> Iterator[Verify]:
    target = session.target
    if not (target.native_verify and target.supports_batching):
        return
    graph = StepGraph(target, head=None)
    for rows in ROWS:
        for tokens in LENGTHS:
            with session.measuring(f"verify passes of {rows} by {tokens}"):
                yield measure_verify(session, graph, rows, tokens)


def _compare_answers(session: Session) -> dict[str, object]:
    """Ask all questions alone and in company, with drafts and without."""
    questions = [*QUESTIONS, *_FURTHER_QUESTIONS]
    prompts = [chat_prompt(session.engine.prompts, question) for question in questions]
    found: dict[str, object] = {}
    alone: list[Answer] = []
    with session.measuring("answers alone"):
        for prompt in prompts:
            alone += _answer(session, [prompt])
    prompts = prompts[: len(alone)]
    if not prompts:
        return found
    with session.measuring("answers in company"):
        found["in_company"] = compare(_answer(session, prompts), alone)
    if k := session.engine.settings.draft_tokens if _longest_draft(session.engine) else 0:
        with session.measuring("answers with drafts"):
            drafted = [_answer(session, [prompt], k=k)[0] for prompt in prompts]
            found["with_drafts"] = compare(drafted, alone)
            found["acceptance"] = _acceptance([one.row.speculation.total() for one in drafted])
    with session.measuring("exact answers"):
        exact_alone = [_answer(session, [prompt], exact=True)[0] for prompt in prompts]
        together = _answer(session, prompts, exact=True)
        found["exact"] = compare(together, exact_alone, bits=True)
    return found


def _acceptance(counts: Sequence[Speculation]) -> tuple[float, ...]:
    """Return the share of drafts accepted at each position, given that all before it were."""
    total = sum(counts, Speculation())
    reached = [total.steps, *total.accepted_per_position]
    return tuple(min(here / before, 1.0) if before else 0.0 for before, here in pairwise(reached))


def _answer(
    session: Session, prompts: Sequence[Prompt], *, k: int = 0, exact: bool = False
) -> list[Answer]:
    """Answer prompts at the same time."""
    answers = [_ask(session, prompt, k=k, exact=exact) for prompt in prompts]
    while not all(answer.done for answer in answers):
        session.check()
        session.lane.step()
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return answers


def _ask(
    session: Session,
    prompt: Prompt,
    *,
    k: int = 0,
    max_tokens: int = ANSWER_TOKENS,
    ends: bool = True,
    exact: bool = False,
) -> Answer:
    """Add a row to the lane."""
    answer = Answer()
    answer.row = greedy_row(
        session.lane,
        session.engine.prompts,
        prompt,
        draft_tokens=k,
        max_tokens=max_tokens,
        sink=answer.receive,
        top_logprobs=0 if exact else None,
        exact=exact,
    )
    if not ends:
        answer.row.ends = frozenset()
    session.lane.add(answer.row)
    return answer


def _longest_draft(engine: Engine) -> int:
    return engine.settings.draft_tokens if engine.lanes[0].has_head else 0


def _first_difference(answer: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(answer, other, strict=False))
    shorter = min(len(answer), len(other))
    return next((at for at, (one, two) in pairs if one != two), shorter)
