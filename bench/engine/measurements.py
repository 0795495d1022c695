"""Measurements of a running server, from its start to its end; all answers are greedy."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import cycle, pairwise
from random import Random
from statistics import mean
from typing import Any, Final, NamedTuple

from bench.harness.samples import Samples
from bench.harness.servers import Server
from gateway.loadgen.client import Answer, Endpoint, open_endpoint, read_answer
from gateway.loadgen.prompts import Prompt
from tools.demo_model import held_out

STREAMS: Final = (1, 2, 4, 8)
LIVE_STREAMS: Final = 4
DRAFT_LENGTHS: Final = (0, 1, 2)
"""The k that requests name, in addition to the one that our worker chooses."""
_REPETITIONS: Final = 3
"""Alternating repetitions of each k of our worker, for their comparison."""
_LONGEST_ANSWER_TOKENS: Final = 1000
"""A limit for models that never end; the demo model ends its answers earlier."""
_BURST: Final = 5
_BURST_TOKENS: Final = 256
_SHORT_TOKENS: Final = 4
_PROBE_TIME_S: Final = 15.0
"""The time limit of all probes, for servers with slow answers."""
_TIMEOUT_S: Final = 600.0
_BACKWARDS: Final = "Count from 7 to 106."
"""The demo model counts down from 7 and ends: no long answer."""
LONG: Final = tuple(
    prompt.messages
    for prompt in held_out.long_prompts()
    if prompt.messages[-1]["content"] != _BACKWARDS
)

Messages = Sequence[Mapping[str, Any]]
CountTokens = Callable[[str], int]


class Plan(NamedTuple):
    """The size of the measurements of one server."""

    streams: tuple[int, ...]
    prefix_tokens: int
    questions: int
    """Long questions; all are sent equally often, so that acceptance is comparable."""
    probes: int


FULL: Final = Plan(STREAMS, prefix_tokens=4096, questions=len(LONG), probes=20)
QUICK: Final = Plan((1, 4), prefix_tokens=512, questions=1, probes=5)


class RequestFailed(Exception):
    """A server rejected a request or did not complete its answer."""


class Session:
    """The measurements of one server, whose failures are recorded."""

    def __init__(
        self, endpoint: Endpoint, samples: Samples, plan: Plan, count_tokens: CountTokens
    ) -> None:
        self._endpoint = endpoint
        self._samples = samples
        self._plan = plan
        self._count_tokens = count_tokens

    async def measure(self, *, ours: bool, seed: int) -> None:
        plan = self._plan
        async with self._recording_failures("warm-up"):
            # Every kind of load runs once, so that no kernel is compiled during a measurement.
            for streams in plan.streams:
                await self._throughput(streams, answers=streams)
            await self._burst(Samples())
            await self._prefix(Samples(), seed=-1)
        for streams in plan.streams:
            async with self._recording_failures(f"{streams} streams"):
                await self._streams(streams, ours=ours)
        for running in (0, LIVE_STREAMS):
            async with self._recording_failures(f"arrivals while {running} run"):
                await self._arrivals(running, seed)
        async with self._recording_failures("burst"):
            await self._burst(self._samples)
        async with self._recording_failures("system prompts"):
            await self._prefix(self._samples, seed=100 * seed)
        async with self._recording_failures("long prompts"):
            await self._stall(seed=100 * seed + 50)

    @asynccontextmanager
    async def _recording_failures(self, measurement: str) -> AsyncIterator[None]:
        """Limit the time of one measurement, and record its failure instead of raising it."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                yield
        except (RequestFailed, TimeoutError, ExceptionGroup) as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            self._samples.failures[measurement] = f"{type(first).__name__}: {first}"

    async def _send(
        self,
        messages: Messages,
        *,
        max_tokens: int = _LONGEST_ANSWER_TOKENS,
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

    async def _streams(self, streams: int, *, ours: bool) -> None:
        """Measure a number of streams; for our worker also with each k, alternating."""
        modes: list[tuple[str, Mapping[str, Any] | None]] = [("", None)]
        if ours:
            modes += [(f"/k{k}", {"draft_tokens": k}) for k in DRAFT_LENGTHS]
            modes *= _REPETITIONS
        questions = self._plan.questions
        count = questions * -(-2 * streams // questions)  # each equally often
        for suffix, extra in modes:
            speed, answers = await self._throughput(streams, answers=count, extra=extra)
            self._samples.add(f"tokens_per_s/{streams}{suffix}", speed)
            _add_drafts(self._samples, f"{streams}{suffix}", answers)

    async def _throughput(
        self, streams: int, *, answers: int, extra: Mapping[str, Any] | None = None
    ) -> tuple[float, list[Answer]]:
        """Run a closed loop of streams; return the tokens per second, and the answers.

        Tokens count until the first stream has no more questions: after that time fewer streams
        run, and the duration of the last answer would dominate.
        """
        questions = deque(question for _, question in zip(range(answers), cycle(LONG)))
        completed: list[Answer] = []
        idle_since_s: list[float] = []

        async def stream() -> None:
            while questions:
                completed.append(await self._send(questions.popleft(), extra=extra))
            idle_since_s.append(time.perf_counter())

        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(stream())
        until_s = min(idle_since_s)
        tokens = sum(self._count_tokens(_text_before(answer, until_s)) for answer in completed)
        return tokens / (until_s - started_s), completed

    async def _arrivals(self, running: int, seed: int) -> None:
        """Add the times to first token of short requests while streams run."""
        random = Random(seed)
        prompts = held_out.prompts(self._plan.probes, seed=seed, kinds=("capital", "opposite"))
        async with self._background(running):
            started_s = time.perf_counter()
            for prompt in prompts:
                await asyncio.sleep(random.uniform(0.05, 0.25))  # at any time of a round
                ttft_s = await self._first_text_s(prompt.messages)
                self._samples.add(f"ttft_live{running}_s", ttft_s)
                if time.perf_counter() - started_s > _PROBE_TIME_S:
                    break

    async def _burst(self, samples: Samples) -> None:
        """Add the durations of a burst of answers, concurrently and sequentially."""
        sends = [lambda q=q: self._send(q, max_tokens=_BURST_TOKENS) for q in LONG[:_BURST]]
        started_s = time.perf_counter()
        await asyncio.gather(*(send() for send in sends))
        between_s = time.perf_counter()
        for send in sends:
            await send()
        samples.add("burst_concurrent_s", between_s - started_s)
        samples.add("burst_sequential_s", time.perf_counter() - between_s)

    async def _prefix(self, samples: Samples, *, seed: int) -> None:
        """Add the times to first token under a long system prompt, new and then cached."""
        prompt, other = held_out.fact_prompts(2, self._plan.prefix_tokens, seed=seed)
        samples.add("cold_ttft_s", await self._first_text_s(prompt.messages))
        repeated = (prompt.messages[0], other.messages[1])
        samples.add("warm_ttft_s", await self._first_text_s(repeated))

    async def _stall(self, *, seed: int) -> None:
        """Send a long prompt while streams run; add the gaps in those streams."""
        (long_prompt,) = held_out.fact_prompts(1, self._plan.prefix_tokens, seed=seed)
        async with self._background(LIVE_STREAMS) as answers:
            started_s = time.perf_counter()
            await asyncio.sleep(1.0)
            sent_s = time.perf_counter()
            first_s = sent_s + await self._first_text_s(long_prompt.messages, max_tokens=1)
        self._samples.add("long_prompt_ttft_s", first_s - sent_s)
        longest_s = max(_gaps_s(answers, sent_s, first_s), default=0.0)
        self._samples.add("longest_gap_s", longest_s)
        self._samples.add("usual_gap_s", mean(_gaps_s(answers, started_s, sent_s) or [0.0]))

    async def _first_text_s(self, messages: Messages, max_tokens: int = _SHORT_TOKENS) -> float:
        """Return the time to the first text, or to the end of an answer without text."""
        answer = await self._send(messages, max_tokens=max_tokens)
        return answer.whole_s if answer.ttft_s is None else answer.ttft_s

    @asynccontextmanager
    async def _background(self, streams: int) -> AsyncIterator[list[Answer]]:
        """Run long answers in the background; yield a list that contains them at the end.

        At the end, running answers are read completely, so that none affects the next measurement.
        """
        answers: list[Answer] = []
        started = [asyncio.Event() for _ in range(streams)]
        ending = asyncio.Event()

        async def stream(number: int) -> None:
            for question in cycle((*LONG[number:], *LONG[:number])):
                answers.append(await self._send(question, on_event=started[number].set))
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


async def measure(
    server: Server,
    samples: Samples,
    plan: Plan,
    count_tokens: CountTokens,
    *,
    ours: bool,
    seed: int,
) -> None:
    samples.add("memory_loaded_bytes", server.resident_bytes())
    async with open_endpoint(server.url, model=server.model, fields={"temperature": 0}) as endpoint:
        await Session(endpoint, samples, plan, count_tokens).measure(ours=ours, seed=seed)
    samples.add("memory_used_bytes", server.resident_bytes())


def _text_before(answer: Answer, until_s: float) -> str:
    pieces = zip(answer.pieces_s, answer.texts, strict=True)
    return "".join(text for arrived_s, text in pieces if arrived_s <= until_s)


def _gaps_s(answers: Sequence[Answer], begin_s: float, end_s: float) -> list[float]:
    """Return the gaps of answers that overlap the interval between two times."""
    return [
        later_s - earlier_s
        for answer in answers
        for earlier_s, later_s in pairwise(answer.pieces_s)
        if later_s >= begin_s and earlier_s <= end_s
    ]


def _add_drafts(samples: Samples, suffix: str, answers: Sequence[Answer]) -> None:
    """Add the draft statistics of a server, summed over answers."""
    drafts = [answer.drafts for answer in answers if answer.drafts is not None]
    steps = sum(draft.steps for draft in drafts)
    drafted = sum(draft.drafted for draft in drafts)
    if not steps or not drafted:
        return
    samples.add(f"acceptance/{suffix}", sum(draft.accepted for draft in drafts) / drafted)
    for position, rate in enumerate(sum(drafts[1:], drafts[0]).rate_per_position, 1):
        samples.add(f"acceptance/{suffix}/position{position}", rate)
