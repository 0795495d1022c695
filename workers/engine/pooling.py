"""The engine of an embedder or a reranker: rows of all requests, in batches of similar length.

A request becomes a job of many rows. Each step takes the longest row of the next job, and fills the
batch with rows that are at least half as long: so little of it is padding, jobs take turns, and a
small one never waits for the end of a large one.
"""

import asyncio
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from paceline.protocol import LaneReport, StartStage
from paceline.request.pooling import EmbeddingsRequest, RerankRequest
from paceline.request.profile import Endpoint
from workers.engine import types
from workers.engine.decode.memory_pressure import MemoryMonitor, Pressure, memory_reader
from workers.engine.decode.metrics import Throughput
from workers.engine.lane.thread import EngineThread, ThreadedEngine
from workers.engine.model.device import limit_freed_buffers, limit_memory, memory_limit_bytes
from workers.engine.model.model_folder import refusing
from workers.engine.model.pooling_model import (
    Embedder,
    Floats,
    PoolingModel,
    Reranker,
    TokenRow,
    load_pooling_model,
)
from workers.engine.text.long_text import in_turn
from workers.engine.types import Pooled

logger = logging.getLogger(__name__)

SLOTS = 32
"""Requests that a gateway sends at once; their rows share batches."""
_QUEUE_LIMIT = 256
_BATCH_TOKENS = 8192
"""Tokens of a step, with padding; a longer row has its own step."""
_BATCH_ROWS = 64
_UNMEASURED_TOKENS_PER_S = 1000.0


@dataclass(slots=True, eq=False)
class Job:
    """The rows of one request."""

    rows: Sequence[TokenRow]
    numbers: Floats
    """[rows, dimensions]."""
    ended: Future[None] = field(default_factory=Future)
    """Is done once they are computed, or has the `EngineError` why they are not."""
    cancelled: bool = False
    pending: list[int] = field(init=False)
    """Indices of rows that no step has computed, the shortest first."""

    def __post_init__(self) -> None:
        self.pending = sorted(range(len(self.rows)), key=self._length)
        self.ended.set_running_or_notify_cancel()  # whoever waits cannot cancel it

    def _length(self, index: int) -> int:
        return len(self.rows[index].tokens)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest pending row."""
        return self._length(self.pending[-1])

    @property
    def tokens(self) -> int:
        """Return the tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)

    def take(self, limit: int, shortest: int, longest: int) -> list[int]:
        """Take pending rows of a length within bounds, at most `limit`, the longest first."""
        end = bisect_left(self.pending, longest + 1, key=self._length)
        begin = max(bisect_left(self.pending, shortest, key=self._length), end - limit)
        taken = self.pending[begin:end]
        del self.pending[begin:end]
        return taken[::-1]


class PoolingLane:
    """The jobs of one model; the engine's thread computes them, any thread reads the report."""

    def __init__(self, model: PoolingModel, *, batch_tokens: int = _BATCH_TOKENS) -> None:
        self._model = model
        self._batch_tokens = batch_tokens
        self._jobs: deque[Job] = deque()
        """With pending rows; the next step begins with the first."""
        self._open_jobs = 0
        self._pending_tokens = 0
        self._requests = 0
        self._prompt_tokens = 0
        self._speed = Throughput()

    @property
    def busy(self) -> bool:
        """Return whether there is a row to compute."""
        return bool(self._jobs)

    @property
    def full(self) -> bool:
        """Return whether as many jobs wait as may."""
        return self._open_jobs >= SLOTS + _QUEUE_LIMIT

    @property
    def retry_after_s(self) -> float:
        """Return the time in which the present rows are computed, as far as is known."""
        speed = self._speed.tokens_per_s or _UNMEASURED_TOKENS_PER_S
        return max(1.0, self._pending_tokens / speed)

    def add(self, job: Job) -> None:
        """Queue a job."""
        self._open_jobs += 1
        self._pending_tokens += job.tokens
        self._jobs.append(job)

    def step(self) -> None:
        """Compute one batch; raise if the model fails for one token too."""
        for job in [job for job in self._jobs if job.cancelled]:
            self._end(job, types.GenerationFailed())
        if not self._jobs:
            return
        batch = self._next_batch()
        rows = [job.rows[index] for job, index in batch]
        tokens = sum(len(row.tokens) for row in rows)
        self._pending_tokens -= tokens
        began_s = time.perf_counter()
        try:
            numbers = self._model.forward(rows)
            if not np.isfinite(numbers).all():
                raise FloatingPointError("the model returned a number that is not finite")
        except Exception:  # whatever a model raises ends these jobs; a token shows if it can go on
            logger.exception("pooling.failed rows=%d", len(rows))
            for job in dict.fromkeys(job for job, _ in batch):
                self._end(job, types.GenerationFailed())
            self._model.forward([TokenRow.of([0])])
            return
        self._prompt_tokens += tokens
        self._speed.observe(tokens, time.perf_counter() - began_s)
        for (job, index), found in zip(batch, numbers, strict=True):
            job.numbers[index] = found
        for job in dict.fromkeys(job for job, _ in batch):
            if not job.pending:
                self._end(job, None)

    def close(self, reason: types.EngineError) -> None:
        """End every job with this error."""
        for job in [*self._jobs]:
            self._end(job, reason)

    def report(self) -> LaneReport:
        """Return a copy of the counts; each is independent of the others."""
        open_jobs = self._open_jobs
        return LaneReport(
            name=self._model.endpoint.value,
            running=min(open_jobs, SLOTS),
            waiting=max(open_jobs - SLOTS, 0),
            slots=SLOTS,
            pending_prefill_tokens=self._pending_tokens,
            prefill_tokens_per_s=self._speed.tokens_per_s,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
        )

    def _next_batch(self) -> list[tuple[Job, int]]:
        """Take the rows of the next step from the first job, then from those behind it."""
        first = self._jobs[0]
        longest = first.longest
        room = min(max(self._batch_tokens // longest, 1), _BATCH_ROWS)
        batch: list[tuple[Job, int]] = []
        for job in self._jobs:
            if len(batch) == room:
                break
            taken = job.take(room - len(batch), (longest + 1) // 2, longest)
            batch += [(job, index) for index in taken]
        self._jobs.rotate(-1)
        return batch

    def _end(self, job: Job, error: types.EngineError | None) -> None:
        self._jobs.remove(job)
        self._open_jobs -= 1
        self._requests += 1
        self._pending_tokens -= sum(len(job.rows[index].tokens) for index in job.pending)
        if error is None:
            job.ended.set_result(None)
        else:
            job.ended.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSettings:
    """Settings of an engine for an embedder or a reranker."""

    model: Path
    """A local directory in the format of Hugging Face."""
    served_name: str
    endpoint: Endpoint


class PoolingEngine(ThreadedEngine):
    """An embedder or a reranker and its thread; create it with `PoolingEngine.start`."""

    def __init__(
        self, settings: PoolingSettings, model: Embedder | Reranker, thread: EngineThread
    ) -> None:
        super().__init__(thread, MemoryMonitor(memory_reader(memory_limit_bytes())))
        self._model = model
        self._lane = PoolingLane(model)
        parameters = [array for _, array in tree_flatten(model.module.parameters())]
        self.card = types.PoolingCard(
            model=settings.served_name,
            lanes=(model.endpoint.value,),
            context_tokens=model.context_tokens,
            parameters=sum(array.size for array in parameters),
            weights_bytes=sum(array.nbytes for array in parameters),
            dimensions=model.dimensions,
        )

    @classmethod
    def start(
        cls, settings: PoolingSettings, progress: types.ProgressSink = lambda *_: None
    ) -> "PoolingEngine":
        """Load the model on a new thread and serve it; raise `ModelUnusable` if that fails."""
        thread = EngineThread()

        def load() -> tuple[PoolingEngine, tuple[PoolingLane, ...]]:
            with refusing(settings.model):
                progress(StartStage.WEIGHTS, 0, 0)
                limit_memory()
                model = load_pooling_model(settings.model, settings.endpoint)
                progress(StartStage.KERNELS, 0, 1)
                model.forward([TokenRow.of([0, 0]), TokenRow.of([0])])
                limit_freed_buffers()
                engine = cls(settings, model, thread)
            return engine, (engine._lane,)

        return thread.start(load)

    def lane_reports(self) -> tuple[LaneReport, ...]:
        """Return the counts of the one lane; safe from any thread."""
        return (self._lane.report(),)

    async def compute(
        self, request: EmbeddingsRequest | RerankRequest, token_limit: int | None = None
    ) -> Pooled:
        """Return a vector for each text, or a score for each document; raise an `EngineError`."""
        rows = await self._read(request, token_limit)
        if self._lane.full:
            raise types.EngineBusy(retry_after_s=self._lane.retry_after_s)
        reading = self.memory_reading()
        if reading.pressure is Pressure.CRITICAL:
            self.thread.call(mx.clear_cache)
        reading.check()
        job = Job(rows, np.zeros((len(rows), self._model.dimensions), dtype=np.float32))
        self.thread.submit(partial(self._lane.add, job))
        try:
            await asyncio.wrap_future(job.ended)
        finally:
            job.cancelled = True  # the lane drops it before the next step, if it still has it
        return Pooled(job.numbers, job.tokens)

    async def check(self, request: EmbeddingsRequest | RerankRequest) -> int:
        """Return the tokens of a request; raise an `EngineError` if it can never be answered."""
        return sum(len(row.tokens) for row in await self._read(request, None))

    async def _read(
        self, request: EmbeddingsRequest | RerankRequest, token_limit: int | None
    ) -> list[TokenRow]:
        """Return the rows of a request; raise an `EngineError` if the model cannot read them."""
        model, truncate = self._model, request.truncate
        if isinstance(request, EmbeddingsRequest):
            assert isinstance(model, Embedder), "a reranker has no vectors"
            if request.dimensions is not None and request.dimensions > model.dimensions:
                raise types.InvalidGeneration(
                    "dimensions", f"A vector of this model has {model.dimensions} numbers."
                )
            param, chars = "input", sum(map(len, request.inputs))
            read = partial(model.rows, request.inputs, truncate=truncate)
        else:
            assert isinstance(model, Reranker), "an embedder has no scores"
            param, documents = "documents", request.documents
            chars = len(request.query) * len(documents) + sum(map(len, documents))
            read = partial(
                model.rows,
                request.query,
                documents,
                document_tokens=request.document_tokens,
                truncate=truncate,
            )
        return await in_turn(chars, lambda: self._check(read(), param, token_limit))

    def _check(self, rows: list[TokenRow], param: str, token_limit: int | None) -> list[TokenRow]:
        context, total = self._model.context_tokens, 0
        for index, row in enumerate(rows):
            count, where = len(row.tokens), f"{param}[{index}]"
            total += count
            if not count:
                raise types.InvalidGeneration(where, "The text has no tokens.")
            if count > context:
                # In OpenAI's words, by which clients know that they must cut the text.
                raise types.InvalidGeneration(
                    where,
                    f"This model's maximum context length is {context} tokens. However, '{where}' "
                    f"resulted in {count} tokens. Please reduce its length, or set 'truncate' to "
                    "true. (context_length_exceeded)",
                    code="context_length_exceeded",
                )
            if (highest := int(row.tokens.max())) >= self._model.vocabulary:
                raise types.InvalidGeneration(where, f"Token {highest} is not in the vocabulary.")
        if token_limit is not None and total > token_limit:
            raise types.TokenLimitExceeded(total)
        return rows
