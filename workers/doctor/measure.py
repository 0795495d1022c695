"""Measurements of a loaded model: rounds by k and rows, reading, equal answers.

Rounds are those of the lane that serves requests. Every measurement has a share of the time; what
that does not suffice for is skipped, and the report says so.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import median
from typing import Any, NamedTuple

from paceline.protocol import Speculation
from workers.doctor.report import Equality, Round
from workers.engine.decode.row import Row
from workers.engine.engine import Engine
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.startup.self_test import QUESTIONS, chat_prompt, greedy_row
from workers.engine.types import Delta, EngineError, Event, Finished, Prompt

ROWS = (1, 2, 4, 8)
ANSWER_TOKENS = 48
_FURTHER_QUESTIONS = (
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "What is 17 + 25?",
    "List five animals, one per line.",
)
_ROUNDS = 16
_CELL_S = 3.0
"""Limit of one cell of a table, once it has begun."""
_READ_TOKENS = 2048
_READ_S = 8.0
_READ_SHARE = 0.125
"""Of the time for all measurements."""
_ENDLESS = 1 << 20


class OutOfTime(Exception):
    """The time for all measurements is over."""


@dataclass(slots=True)
class Session:
    """A loaded model, and the time that is left to measure it."""

    engine: Engine
    until_s: float
    """When the time is over, by `time.perf_counter`."""
    on_step: Callable[[], None] = lambda: None
    """Called before each measurement."""
    skipped: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def lane(self) -> LaneScheduler:
        """Return the lane that is measured."""
        return self.engine.lanes[0]

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Name what is measured; record it if the time is over before its end, or if it fails."""
        self.on_step()
        try:
            yield
        except OutOfTime:
            self.skipped.append(name)
        except EngineError as error:
            self.failures.append(f"The measurement of {name} failed: {error}")
        finally:
            for rows in self.lane.rows_by_batch():
                for row in rows:
                    row.cancelled = True
            while self.lane.busy:
                self.lane.step()

    def check(self) -> None:
        """Raise `OutOfTime` if the time is over."""
        if time.perf_counter() >= self.until_s:
            raise OutOfTime


class Answer(NamedTuple):
    """The answer to one question, and its events so far."""

    row: Row
    events: list[Event | EngineError]

    @property
    def done(self) -> bool:
        """Return whether the answer has ended."""
        return bool(self.events) and isinstance(self.events[-1], Finished | EngineError)

    @property
    def logprobs(self) -> list[float]:
        """Return the log-probability of each token."""
        deltas = (event for event in self.events if isinstance(event, Delta))
        return [one.logprob for delta in deltas for one in delta.logprobs]


def steps_of(engine: Engine) -> int:
    """Return how many steps `measure_all` takes."""
    return 1 + len(ROWS) * (1 + _longest_draft(engine)) + 4


def measure_all(session: Session) -> dict[str, Any]:
    """Return the fields of a `Report` that the time suffices for."""
    found: dict[str, Any] = {}
    with session.measuring("reading a prompt"):
        found["prefill_tokens_per_s"] = measure_reading(session)
    # Answers first: without their acceptance, the time of a drafted round says nothing.
    found |= _compare_answers(session)
    rounds = []
    # Plain rounds of all sizes first: the others are compared with them.
    for k in range(_longest_draft(session.engine) + 1):
        for rows in ROWS:
            with session.measuring(f"rounds of {rows} with k = {k}"):
                rounds.append(measure_round(session, rows, k))
    found["rounds"] = tuple(rounds)
    if (exact := found.get("exact")) and (changed := exact.answers - exact.same_bits):
        session.failures.append(
            f"Of {exact.answers} exact answers {changed} changed in the company of others."
        )
    return found | {"skipped": tuple(session.skipped), "failures": tuple(session.failures)}


def measure_reading(session: Session) -> float:
    """Return how many tokens of a prompt the model reads in a second."""
    session.check()
    text = " ".join(f"{number} {QUESTIONS[number % len(QUESTIONS)]}" for number in range(400))
    tokens = session.engine.prompts.prepare(Prompt(text=text)).tokens
    limit = min(_READ_TOKENS, session.engine.card.context_tokens // 2)
    answer = _ask(session, Prompt(tokens=tokens[:limit]), max_tokens=1)
    begun_s, read = time.perf_counter(), 0
    limit_s = min(_READ_S, (session.until_s - begun_s) * _READ_SHARE)
    while not answer.done and time.perf_counter() - begun_s < limit_s:
        session.lane.step()
        read = next((one.read_count for one in session.lane.prefills), limit)
    return read / (time.perf_counter() - begun_s)


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
    begun_s = time.perf_counter()
    while len(costs_s) < _ROUNDS and lane.running_rows == rows:
        round_s = time.perf_counter()
        lane.step()
        costs_s.append(time.perf_counter() - round_s)
        if time.perf_counter() - begun_s > _CELL_S:
            break
    if not costs_s:
        raise OutOfTime
    return Round(rows=rows, k=k, round_s=median(costs_s), samples=len(costs_s))


def compare(answers: Sequence[Answer], alone: Sequence[Answer], *, bits: bool = False) -> Equality:
    """Return how many answers equal those without company; with `bits`, also in log-probability."""
    pairs = list(zip(answers, alone, strict=True))
    texts = [(one.row.answer, other.row.answer) for one, other in pairs]
    differences = [
        len([*takewhile(lambda tokens: tokens[0] == tokens[1], zip(one, other, strict=False))])
        for one, other in texts
        if one != other
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


def _compare_answers(session: Session) -> dict[str, Any]:
    """Ask all questions one by one and in company, with drafts and without."""
    questions = [*QUESTIONS, *_FURTHER_QUESTIONS]
    prompts = [chat_prompt(session.engine.prompts, question) for question in questions]
    found: dict[str, Any] = {}
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
        if isinstance(answer.events[-1], EngineError):
            raise answer.events[-1]
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
    events: list[Event | EngineError] = []
    row = greedy_row(
        session.lane,
        session.engine.prompts,
        prompt,
        draft_tokens=k,
        max_tokens=max_tokens,
        sink=events.append,
        top_logprobs=0 if exact else None,
        exact=exact,
    )
    if not ends:
        row.ends = frozenset()
    session.lane.add(row)
    return Answer(row, events)


def _longest_draft(engine: Engine) -> int:
    return engine.settings.draft_tokens if engine.lanes[0].has_head else 0
