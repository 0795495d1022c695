"""The engine of a group: it renders prompts and writes answers here; the ranks make the tokens.

A worker with it is a worker as any other, with one lane. A row that mlx-lm batches leaves when
its client leaves; a seeded request runs by itself and cannot be stopped on all ranks at once, so
it is read to its end. The group dies with any of its ranks, and starts again.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from transformers import AutoTokenizer

from paceline.drain_rate import QueuePlace
from paceline.protocol import LaneReport, StartStage
from workers.engine import types
from workers.engine.decode.memory_pressure import MemoryReading
from workers.engine.decode.metrics import LaneCounters
from workers.engine.decode.row import Row
from workers.engine.model.checkpoint import ModelFacts, limit_context, read_facts
from workers.engine.model.model_folder import check_folder, forbid_code, refusing
from workers.engine.prefix.transfer import PrefixOffer, PrefixQuery, PrefixSource, TransferFailed
from workers.engine.text.tokenizer import PromptRenderer
from workers.group.checks import check_facts, choose_split, refuse_unsupported
from workers.group.hosts import Hosts
from workers.group.rank import RankMessage, RankRequest
from workers.group.ranks import RankRefused, Ranks, RanksDied
from workers.model_source import ModelSource
from workers.settings import Split, WorkerSettings

log = logging.getLogger(__name__)

_FIRST_TOKEN_S = 1800.0
"""Loading hundreds of gigabytes takes minutes."""
_PROBE_S = 5.0
"""An idle group makes a token so often, and within this time."""
_READ_PATIENCE_S = 30.0
"""While prompts are read, a chunk of one is read, or an answer gets a token, at least so often."""
_WRITE_PATIENCE_S = 10.0
"""The same while all running answers have tokens."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_GIVE_UP_AFTER = 5
_QUEUE_LIMIT = 256
_RETRY_AFTER_S = 5.0
_PROBE_SCOPE = "probe"
_DROP_SCOPE = "drop"


@dataclass(slots=True)
class _Answer:
    """An answer that the ranks have not ended yet."""

    row: Row
    events: asyncio.Queue[types.Event | types.EngineError]
    runs_alone: bool
    left: bool = False
    """Whether nobody reads it any more."""
    sampled_s: float = 0.0


@dataclass(kw_only=True, eq=False)
class GroupEngine:
    """One model on several machines; create it with `GroupEngine.start`.

    mlx-lm reports nothing of its prefix cache, and a rank whose allocation fails dies.
    """

    hosts: Hosts
    model: str
    """As the ranks know it: a folder that is the same on all machines, or a repository."""
    rows: int
    facts: ModelFacts
    split: Split
    prompts: PromptRenderer
    card: types.ModelCard
    alive: bool = True
    ready: bool = False
    """Whether all ranks have made a token, and live."""
    _ranks: Ranks | None = None
    _answers: dict[int, _Answer] = field(default_factory=dict)
    _signals: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Requests of this engine itself, by number, until their ends."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _limit_bytes: int = 0
    _deaths: int = 0
    """In a row, without a token of all ranks between them."""
    _supervision: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._counters = LaneCounters(types.LaneName.VLM, slots=self.rows, draft_tokens=0)

    @classmethod
    def start(
        cls,
        settings: WorkerSettings,
        hosts: Hosts,
        source: ModelSource,
        loop: asyncio.AbstractEventLoop,
        progress: types.ProgressSink = lambda *_: None,
    ) -> "GroupEngine":
        """Start the ranks, supervised by `loop`, up to their first token; called in a thread.

        Raises `ModelUnusable` if the model cannot be split so, or the ranks cannot serve it.
        """
        folder = source.fetch(partial(progress, StartStage.DOWNLOAD))
        progress(StartStage.WEIGHTS, 0, 0)
        ranks = len(hosts.hosts)
        with refusing(folder):
            config = check_folder(folder)
            forbid_code()
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            facts = limit_context(read_facts(folder, config, tokenizer), settings.context)
            split = choose_split(folder, config, ranks, settings.split)
            prompts = PromptRenderer(facts.processor, facts.context_tokens)
        card = types.ModelCard(
            model=source.served_name,
            lanes=(types.LaneName.VLM,),
            context_tokens=facts.context_tokens,
            parameters=0,
            weights_bytes=sum(one.stat().st_size for one in folder.glob("*.safetensors")),
            mtp_unavailable_reason=f"it runs on {ranks} ranks, which draft nothing",
            default_max_tokens=facts.default_max_tokens,
            sampling=facts.sampling,
            group_size=ranks,
        )
        engine = cls(
            hosts=hosts,
            model=str(source.folder) if source.folder else source.served_name,
            rows=settings.rows,
            facts=facts,
            split=split,
            prompts=prompts,
            card=card,
        )
        asyncio.run_coroutine_threadsafe(engine._begin(), loop).result()
        return engine

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """Return the counts of the lane."""
        return (self._counters.report(),)

    def queue_place(self, generation: types.Generation) -> QueuePlace | None:
        """Return None: mlx-lm reports no places."""
        del generation
        return None

    def state(self) -> types.EngineState:
        """Return the memory in use by MLX on all ranks, and the sum of their limits."""
        used_bytes = self._ranks.memory_bytes if self._ranks else 0
        return types.EngineState(memory_bytes=used_bytes, memory_limit_bytes=self._limit_bytes)

    def memory_reading(self) -> MemoryReading:
        """Return the same memory."""
        state = self.state()
        return MemoryReading(used_bytes=state.memory_bytes, limit_bytes=state.memory_limit_bytes)

    @asynccontextmanager
    async def open(self, query: PrefixQuery) -> AsyncIterator[PrefixOffer]:
        """Offer nothing: no other engine has such parts of a cache."""
        del query
        raise TransferFailed("absent")
        yield

    async def drop_prefixes(self, scope: str | None) -> None:
        """Delete the whole prefix cache, whatever the scope, once the running answers have ended.

        mlx-lm does not report which sequences belong to a scope.
        """
        del scope
        if self._ranks is not None and self.ready:
            await self._signal(self._ranks, RankRequest(id=0, scope=_DROP_SCOPE))

    def stop(self) -> None:
        """Kill the ranks; running generations raise `EngineStopped`."""
        self.alive = self.ready = False
        if self._supervision is not None:
            self._supervision.cancel()
        if self._ranks is not None:
            self._ranks.kill()
        self._fail_answers(types.EngineStopped("The worker shuts down."))

    async def check(self, generation: types.Generation) -> int:
        """Return the tokens of the prompt; raise an `EngineError` if it can never be answered."""
        return len((await self._make_answer(generation)).row.prompt.tokens)

    async def generate(
        self,
        generation: types.Generation,
        prefix_sources: Sequence[PrefixSource] = (),  # noqa: ARG002  # a group fetches none
    ) -> AsyncGenerator[types.Event, None]:
        """Yield the events of one generation; raise an `EngineError` if it cannot continue."""
        if len(self._answers) >= _QUEUE_LIMIT:
            raise types.EngineBusy(_RETRY_AFTER_S)
        answer = await self._make_answer(generation)
        ranks = self._ranks
        if ranks is None or not self.ready:
            raise types.EngineStopped("The group starts again.")
        if not answer.row.max_tokens:  # mlx-lm would write a token
            answer.row.finish_reason = types.FinishReason.LENGTH
            self._counters.record_finish(answer.row)
            yield answer.row.finished_event()
            return
        number = next(self._numbers)
        ranks.submit(_request_of(number, answer))
        self._answers[number] = answer
        self._count_rows()
        try:
            while True:
                event = await answer.events.get()
                if isinstance(event, types.EngineError):
                    raise event
                yield event
                if isinstance(event, types.Finished):
                    return
        finally:
            answer.left = True
            self._counters.record_finish(answer.row)
            if number in self._answers and not answer.runs_alone:
                ranks.cancel(number)
                self._end(number)

    async def _make_answer(self, generation: types.Generation) -> _Answer:
        """Return an answer to run; raise an `EngineError` if the ranks can never make it."""
        context_tokens, vocabulary = self.card.context_tokens, self.facts.vocabulary
        prompt = await self.prompts.read(generation, context_tokens)
        if generation.lane is not types.LaneName.VLM:
            raise types.InvalidGeneration("model", f"This worker has no {generation.lane} lane.")
        refuse_unsupported(generation)
        prompt.check(context_tokens, vocabulary)
        generation.check_tokens(vocabulary)
        count = len(prompt.tokens)
        events: asyncio.Queue[types.Event | types.EngineError] = asyncio.Queue()
        row = Row(
            generation=generation,
            prompt=prompt,
            seed=0,  # mlx-lm draws
            max_tokens=generation.answer_limit(
                count, context_tokens - count, self.facts.default_max_tokens
            ),
            ends=self.facts.eos | generation.stop_tokens,
            draft_tokens=0,
            with_head=False,
            text=self.prompts.stream(generation),
            reasoning=self.prompts.reasoning(generation, prompt.tokens),
            sink=events.put_nowait,
        )
        return _Answer(row, events, runs_alone=generation.sampling.seed is not None)

    def _take(self, message: RankMessage) -> None:
        """Take a message of rank 0."""
        if (signal := self._signals.get(message.id)) is not None:
            if message.ended and not signal.done():
                signal.set_result(None)
            return
        answer = self._answers.get(message.id)
        if answer is None:
            return
        if message.failure:
            log.error("group.answer_failed reason=%s", message.failure)
            answer.events.put_nowait(types.GenerationFailed("The ranks failed to answer."))
        if not answer.left:
            self._advance(answer, message)
        if message.ended:
            self._end(message.id)
        elif answer.row.finish_reason and not answer.runs_alone and self._ranks is not None:
            if not message.finish_reason:  # a stop string or token, of which mlx-lm does not know
                self._ranks.cancel(message.id)
            self._end(message.id)

    def _advance(self, answer: _Answer, message: RankMessage) -> None:
        row, now_s = answer.row, asyncio.get_running_loop().time()
        if message.cached_tokens is not None:
            row.cached_tokens = message.cached_tokens
            self._counters.record_prefix_lookup(row, 0.0)
            answer.sampled_s = now_s
        elif message.read is not None:
            read, total = message.read
            answer.events.put_nowait(types.PrefillProgress(read_tokens=read, prompt_tokens=total))
        elif message.token is not None and not row.finish_reason:
            if row.answer:
                self._counters.record_decode(1.0, now_s - answer.sampled_s)
            else:
                read = len(row.prompt.tokens) - row.cached_tokens
                self._counters.record_prefill(read, now_s - answer.sampled_s)
            answer.sampled_s = now_s
            row.append_tokens([message.token], self._logprobs(row, message), now_s=now_s)
            if message.finish_reason and not row.finish_reason:
                row.end(types.FinishReason(message.finish_reason), now_s=now_s)
            if row.finish_reason:
                answer.events.put_nowait(row.finished_event())

    def _logprobs(self, row: Row, message: RankMessage) -> tuple[types.TokenLogprob, ...]:
        top, token = row.generation.top_logprobs, message.token
        if top is None or token is None:
            return ()
        others = tuple(
            types.ScoredToken(token_id=other, raw=self.prompts.raw(other), logprob=logprob)
            for other, logprob in message.top[:top]
        )
        scored = types.TokenLogprob(
            token_id=token, raw=self.prompts.raw(token), logprob=message.logprob, top=others
        )
        return (scored,)

    def _end(self, number: int) -> None:
        self._answers.pop(number, None)
        self._count_rows()

    def _count_rows(self) -> None:
        active = self._answers.values()
        running = min(len(active), self.rows)
        unread = sum(
            len(answer.row.prompt.tokens) - answer.row.cached_tokens
            for answer in active
            if not answer.row.answer
        )
        self._counters.set_occupancy(
            running=running, waiting=len(active) - running, pending_prefill_tokens=unread
        )

    def _patience_s(self) -> float | None:
        if self._answers:
            reading = any(not answer.row.answer for answer in self._answers.values())
            return _READ_PATIENCE_S if reading else _WRITE_PATIENCE_S
        return _PROBE_S if self._signals and self.ready else None

    async def _signal(self, ranks: Ranks, request: RankRequest) -> None:
        """Send a request of this engine itself, and wait for its end, or for that of the group."""
        number = next(self._numbers)
        ranks.submit(request.model_copy(update={"id": number}))
        ended = self._signals[number] = asyncio.get_running_loop().create_future()
        try:
            await ended
        finally:
            del self._signals[number]

    def _probe(self) -> RankRequest:
        """Return a request for one token, which takes all ranks."""
        return RankRequest(id=0, prompt=[min(self.facts.eos, default=0)], scope=_PROBE_SCOPE)

    async def _begin(self) -> None:
        """Start the supervision; return at the first token, or raise `ModelUnusable`."""
        started = asyncio.get_running_loop().create_future()
        self._supervision = asyncio.create_task(self._supervise(started), name="group")
        await started

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """Run the ranks, again and again; set the result of `started` at their first token."""
        while True:
            try:
                await self._run_ranks(started)
            except (RankRefused, RanksDied) as end:
                reason, refused = str(end), isinstance(end, RankRefused)
            self._deaths += 1
            deaths = self._deaths
            if not started.done() and (refused or deaths >= _GIVE_UP_AFTER):
                ended = f"The group ended {deaths} times before it was ready: {reason}."
                started.set_exception(types.ModelUnusable(reason if refused else ended))
                return
            wait_s = min(_FIRST_WAIT_S * 2 ** min(deaths - 1, 10), _LONGEST_WAIT_S)
            log.error("group.died reason=%s restart_in_s=%g", reason, wait_s)
            await asyncio.sleep(wait_s)

    async def _run_ranks(self, started: asyncio.Future[None]) -> None:
        """Run the ranks up to their common end: raises `RanksDied` or `RankRefused`."""
        ranks = Ranks(self.hosts, on_answer=self._take, patience_s=self._patience_s)
        try:
            facts = await ranks.launch(self.model)
            check_facts(self.hosts, facts, self.card.weights_bytes)
            self._limit_bytes = sum(one.limit_bytes for one in facts)
            self._ranks = ranks
            ranks.begin(self.split, facts, self.rows)
            first = asyncio.create_task(self._signal(ranks, self._probe()))
            await ranks.first_token(first, _FIRST_TOKEN_S)
            self.ready, self._deaths = True, 0
            log.info("group.ready ranks=%d split=%s", len(self.hosts.hosts), self.split)
            if not started.done():
                started.set_result(None)
            probes = asyncio.create_task(self._probe_when_idle(ranks))
            try:
                await ranks.wait()
            finally:
                probes.cancel()
        finally:
            self.ready, self._ranks = False, None
            self._fail_answers(types.EngineStopped("The group has died."))
            await ranks.close()

    async def _probe_when_idle(self, ranks: Ranks) -> None:
        while True:
            await asyncio.sleep(_PROBE_S)
            if not self._answers:
                await self._signal(ranks, self._probe())

    def _fail_answers(self, error: types.EngineError) -> None:
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.events.put_nowait(error)
        for signal in self._signals.values():
            signal.cancel()
        self._count_rows()


def _request_of(number: int, answer: _Answer) -> RankRequest:
    """Return a generation as rank 0 takes it."""
    generation, row = answer.row.generation, answer.row
    prompt = row.prompt
    cuts = {prompt.prefix.tokens if prompt.prefix else 0, prompt.turn_tokens}
    return RankRequest(
        id=number,
        prompt=list(prompt.tokens),
        segments=sorted(cut for cut in cuts if 0 < cut < len(prompt.tokens)),
        # Without a scope nothing may be shared, so such requests have one each.
        scope=f"none:{number}" if prompt.scope is None else f"scope:{prompt.scope}",
        max_tokens=row.max_tokens,
        sampling=generation.sampling,
        top_logprobs=generation.top_logprobs or 0,
        # Those of a row that is batched are found here, and the row leaves the batch.
        stop=list(generation.stop) if answer.runs_alone else [],
    )
