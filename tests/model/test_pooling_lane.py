"""Requests for vectors share batches of similar length, and take turns."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from paceline.request.pooling import EmbeddingsRequest
from paceline.request.profile import Endpoint
from tests.support.pooling_checkpoints import CONTEXT_TOKENS, write_bert_embedder
from workers.engine.model.pooling_model import (
    Embedder,
    Floats,
    PoolingModel,
    TokenRow,
    load_pooling_model,
)
from workers.engine.pooling import Job, PoolingEngine, PoolingLane, PoolingSettings
from workers.engine.types import (
    EngineStopped,
    GenerationFailed,
    InvalidGeneration,
    TokenLimitExceeded,
)

BATCH_TOKENS = 32


class Recorded(PoolingModel):
    """A model that records the lengths of its batches, and may fail."""

    endpoint = Endpoint.EMBEDDINGS

    def __init__(self, model: Embedder) -> None:
        self._model = model
        self.dimensions = model.dimensions
        self.batches: list[list[int]] = []
        self.failures = 0
        self.poisoned = False

    def forward(self, rows: Sequence[TokenRow]) -> Floats:
        self.batches.append([len(row.tokens) for row in rows])
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device failed")
        numbers = self._model.forward(rows)
        return numbers * np.nan if self.poisoned else numbers

    def _read(self, *_: object) -> None:
        raise AssertionError


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    folder = write_bert_embedder(tmp_path_factory.mktemp("models") / "bge")
    model = load_pooling_model(folder, Endpoint.EMBEDDINGS)
    assert isinstance(model, Embedder)
    return model


@pytest.fixture
def model(embedder: Embedder) -> Recorded:
    return Recorded(embedder)


@pytest.fixture
def lane(model: Recorded) -> PoolingLane:
    return PoolingLane(model, batch_tokens=BATCH_TOKENS)


class Submitted:
    """A job in a lane, and how it ended."""

    def __init__(self, lane: PoolingLane, *lengths: int) -> None:
        rows = [TokenRow.of([4 + length % 8] * length) for length in lengths]
        self.results: list[BaseException | None] = []
        numbers = np.zeros((len(rows), 32), np.float32)
        self.job = Job(rows, numbers)
        self.job.ended.add_done_callback(lambda ended: self.results.append(ended.exception()))
        lane.add(self.job)


def test_batches_have_rows_of_similar_length_and_bounded_padding(lane, model, embedder) -> None:
    submitted = Submitted(lane, 3, 30, 4, 16, 2, 15, 3, 4)
    while lane.busy:
        lane.step()
    assert model.batches == [[30], [16, 15], [4, 4, 3, 3, 2]]
    alone = np.concatenate([embedder.forward([row]) for row in submitted.job.rows])
    assert np.allclose(submitted.job.numbers, alone, atol=2e-5)
    assert submitted.results == [None]


def test_a_small_request_does_not_wait_for_the_end_of_a_large_one(lane, model) -> None:
    large, small = Submitted(lane, *[30] * 9), Submitted(lane, 3)
    lane.step()
    lane.step()
    assert (large.results, small.results) == ([], [None])
    others = [Submitted(lane, 16), Submitted(lane, 15)]
    while lane.busy:
        lane.step()
    assert [one.results for one in (large, *others)] == [[None]] * 3
    assert [16, 15] in model.batches


def test_a_cancelled_request_takes_no_further_step(lane: PoolingLane, model: Recorded) -> None:
    submitted = Submitted(lane, *[30] * 5)
    lane.step()
    submitted.job.cancelled = True
    lane.step()
    assert (len(model.batches), lane.busy) == (1, False)
    report = lane.report()
    assert (report.running, report.pending_prefill_tokens, report.requests) == (0, 0, 1)
    assert report.prompt_tokens == 30


@pytest.mark.parametrize("poisoned", [True, False])
def test_a_failed_batch_ends_its_requests_alone(lane, model, *, poisoned) -> None:
    model.poisoned, model.failures = poisoned, int(not poisoned)
    failed, other = Submitted(lane, 30), Submitted(lane, 30)
    lane.step()
    model.poisoned = False
    lane.step()
    assert isinstance(failed.results[0], GenerationFailed)
    assert other.results == [None]
    assert lane.report().pending_prefill_tokens == 0


def test_a_model_that_fails_for_one_token_too_ends_the_thread(lane, model) -> None:
    model.failures = 2
    submitted, waiting = Submitted(lane, 30), Submitted(lane, 30)
    with pytest.raises(RuntimeError):
        lane.step()
    assert isinstance(submitted.results[0], GenerationFailed)
    lane.close(EngineStopped("stopped"))
    assert isinstance(waiting.results[0], EngineStopped)


async def test_an_engine_computes_concurrent_requests_and_refuses_what_it_cannot_read(
    tmp_path: Path, embedder: Embedder
) -> None:
    folder = write_bert_embedder(tmp_path / "bge")
    settings = PoolingSettings(model=folder, served_name="bge", endpoint=Endpoint.EMBEDDINGS)
    engine = await asyncio.to_thread(PoolingEngine.start, settings)
    try:
        freed_limit_bytes = mx.set_cache_limit(0)
        mx.set_cache_limit(freed_limit_bytes)
        assert freed_limit_bytes <= max(mx.get_active_memory(), 32 << 20), "few freed buffers"
        texts = ["the cat", "paris is the capital of france", "a dog"]
        requests = [EmbeddingsRequest("bge", (text,)) for text in texts]
        pooled = await asyncio.gather(*map(engine.compute, requests))
        rows = embedder.rows(texts, truncate=False)
        found = np.concatenate([one.numbers for one in pooled])
        assert np.allclose(found, embedder.forward(rows), atol=2e-5)
        assert [one.tokens for one in pooled] == [len(row.tokens) for row in rows]
        assert await engine.check(requests[1]) == pooled[1].tokens

        with pytest.raises(InvalidGeneration, match="maximum context length is 64 tokens") as long:
            await engine.compute(EmbeddingsRequest("bge", ("cat " * CONTEXT_TOKENS,)))
        assert (long.value.param, long.value.code) == ("input[0]", "context_length_exceeded")
        with pytest.raises(InvalidGeneration, match="Token 9999 is not in the vocabulary"):
            await engine.compute(EmbeddingsRequest("bge", ((1, 9999),)))
        with pytest.raises(InvalidGeneration, match="has 32 numbers"):
            await engine.compute(EmbeddingsRequest("bge", ("cat",), dimensions=33))
        with pytest.raises(TokenLimitExceeded) as refused:
            await engine.compute(requests[0], token_limit=3)
        assert refused.value.tokens == pooled[0].tokens == 4
        report = engine.lane_reports()[0]
        assert (report.name, report.running, report.requests) == ("embeddings", 0, 3)
        assert report.prompt_tokens == sum(one.tokens for one in pooled)
    finally:
        engine.stop()
    with pytest.raises(EngineStopped):
        await engine.compute(requests[0])
