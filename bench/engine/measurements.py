"""Measurements of a running server, one function each; all answers are greedy."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from random import Random
from statistics import mean
from typing import Any, Final

from gateway.loadgen.client import Answer, Endpoint, read_answer
from gateway.loadgen.prompts import Prompt
from tools.demo_model import held_out

STREAMS: Final = (1, 2, 4, 8)
LIVE_STREAMS: Final = 4
LONGEST_ANSWER_TOKENS: Final = 1000
"""A limit for models that never end; the demo model ends its answers earlier."""
BURST: Final = 5
BURST_TOKENS: Final = 256
SHORT_ANSWER_TOKENS: Final = 4
PROBE_TIME_S: Final = 15.0
"""The time limit of all probes, for servers with slow answers."""

_BACKWARDS: Final = "Count from 7 to 106."
"""The demo model counts down from 7 and ends: no long answer."""
LONG: Final = tuple(
    prompt.messages
    for prompt in held_out.long_prompts()
    if prompt.messages[-1]["content"] != _BACKWARDS
)


Messages = Sequence[Mapping[str, Any]]


class RequestFailed(Exception):
    """A server rejected a request or did not complete its answer."""


class Caller:
    """A client of one server for greedy requests."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def send(
        self,
        messages: Messages,
        *,
        max_tokens: int = LONGEST_ANSWER_TOKENS,
        extra: Mapping[str, Any] | None = None,
        on_event: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Return the answer; raise `RequestFailed` if it is incomplete."""
        prompt = Prompt(tuple(messages), max_tokens)
        response = await self._endpoint.send(prompt, fields=extra, on_arrival=on_event)
        answer = read_answer(response)
        if answer.problem:
            raise RequestFailed(answer.problem)
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The result of a closed loop of streams while all of them ran."""

    elapsed_s: float
    tokens: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The delay that a long prompt causes in running streams."""

    long_prompt_ttft_s: float
    longest_gap_s: float
    usual_gap_s: float
    """The mean gap of the same streams before the long prompt."""


async def throughput(
    caller: Caller,
    streams: int,
    *,
    answers: int,
    count_tokens: Callable[[str], int],
    extra: Mapping[str, Any] | None = None,
) -> Throughput:
    """Run streams; count tokens until the first stream has no more questions.

    After that time fewer streams run, and the duration of the last answer would dominate.
    """
    questions = deque(question for _, question in zip(range(answers), cycle(LONG), strict=False))
    completed: list[Answer] = []
    idle_since_s: list[float] = []

    async def stream() -> None:
        while questions:
            completed.append(await caller.send(questions.popleft(), extra=extra))
        idle_since_s.append(time.perf_counter())

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
    until_s = min(idle_since_s)
    return Throughput(
        elapsed_s=until_s - started_s,
        tokens=sum(count_tokens(_text_before(answer, until_s)) for answer in completed),
        answers=tuple(completed),
    )


def _text_before(answer: Answer, until_s: float) -> str:
    """Return the text that had arrived by then."""
    pieces = zip(answer.pieces_s, answer.texts, strict=True)
    return "".join(text for arrived_s, text in pieces if arrived_s <= until_s)


async def arrivals_s(caller: Caller, *, running: int, probes: int, seed: int) -> list[float]:
    """Return the times to first token of short requests while `running` streams run."""
    random = Random(seed)
    prompts = held_out.prompts(probes, seed=seed, kinds=("capital", "opposite"))
    ttfts_s: list[float] = []
    async with _background(caller, running):
        started_s = time.perf_counter()
        for prompt in prompts:
            await asyncio.sleep(random.uniform(0.05, 0.25))  # at any time of a round
            answer = await caller.send(prompt.messages, max_tokens=SHORT_ANSWER_TOKENS)
            ttfts_s.append(first_text_s(answer))
            if time.perf_counter() - started_s > PROBE_TIME_S:
                break
    return ttfts_s


async def burst_s(caller: Caller) -> tuple[float, float]:
    """Return the durations of a burst of answers, concurrently and sequentially."""
    started_s = time.perf_counter()
    await asyncio.gather(*(_burst_answer(caller, question) for question in LONG[:BURST]))
    between_s = time.perf_counter()
    for question in LONG[:BURST]:
        await _burst_answer(caller, question)
    return between_s - started_s, time.perf_counter() - between_s


async def prefix_ttfts_s(caller: Caller, *, tokens: int, seed: int) -> tuple[float, float]:
    """Return the times to first token under a long system prompt, new and then cached."""
    prompt, other = held_out.fact_prompts(2, tokens, seed=seed)
    cold = await caller.send(prompt.messages, max_tokens=SHORT_ANSWER_TOKENS)
    repeated = (prompt.messages[0], other.messages[1])
    warm = await caller.send(repeated, max_tokens=SHORT_ANSWER_TOKENS)
    return first_text_s(cold), first_text_s(warm)


async def stall(caller: Caller, *, tokens: int, seed: int) -> Stall:
    """Send a long prompt while streams run; return the gaps in those streams."""
    (long_prompt,) = held_out.fact_prompts(1, tokens, seed=seed)
    async with _background(caller, LIVE_STREAMS) as answers:
        started_s = time.perf_counter()
        await asyncio.sleep(1.0)
        sent_s = time.perf_counter()
        first_s = sent_s + first_text_s(await caller.send(long_prompt.messages, max_tokens=1))
    return Stall(
        long_prompt_ttft_s=first_s - sent_s,
        longest_gap_s=max(_gaps_s(answers, sent_s, first_s), default=0.0),
        usual_gap_s=mean(_gaps_s(answers, started_s, sent_s) or [0.0]),
    )


def first_text_s(answer: Answer) -> float:
    """Return the time to the first text, or to the end of an answer without text."""
    return answer.whole_s if answer.ttft_s is None else answer.ttft_s


async def _burst_answer(caller: Caller, question: Messages) -> Answer:
    return await caller.send(question, max_tokens=BURST_TOKENS)


@asynccontextmanager
async def _background(caller: Caller, streams: int) -> AsyncIterator[list[Answer]]:
    """Run long answers in the background; yield a list that contains them at the end.

    At the end, running answers are read completely, so that none affects the next measurement.
    """
    answers: list[Answer] = []
    started = [asyncio.Event() for _ in range(streams)]
    ending = asyncio.Event()

    async def stream(number: int) -> None:
        for question in cycle((*LONG[number:], *LONG[:number])):
            answers.append(await caller.send(question, on_event=started[number].set))
            if ending.is_set():
                return

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(stream(number))
        try:
            for event in started:
                await event.wait()
            yield answers
        finally:
            ending.set()


def _gaps_s(answers: Sequence[Answer], begin_s: float, end_s: float) -> list[float]:
    """Return the gaps of answers that overlap the interval between two times."""
    return [
        later_s - earlier_s
        for answer in answers
        for earlier_s, later_s in pairwise(answer.pieces_s)
        if later_s >= begin_s and earlier_s <= end_s
    ]
