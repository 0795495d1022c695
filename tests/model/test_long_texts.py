"""Texts far beyond the context: what is tokenized of them, at which routes, and for whom."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from paceline.request.profile import Endpoint
from tests.support.pooling_checkpoints import write_bert_cross_encoder, write_bert_embedder
from tests.support.raw_client import raw_client, request_bytes
from tests.support.running_gateway import status_and_code, wait_until
from tests.support.worker_process import RunningWorker
from workers.engine.engine import Engine
from workers.engine.model.pooling_model import Embedder, load_pooling_model
from workers.engine.text import long_text
from workers.engine.text.long_text import PIECE_CHARS, chars_beyond, in_turn
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import InvalidGeneration, Prompt

LONG = "The red fox sees the old tree. " * 20_000
"""620,000 characters, a few of which fill the context of the demo model."""
TOOLS = [
    {"type": "function", "function": {"name": f"look_{index}", "description": LONG[:60_000]}}
    for index in range(32)
]


class CountingTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chars = 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.chars += len(text)
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture
def tokenizer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> CountingTokenizer:
    counting = CountingTokenizer(engine.prompts._tokenizer)
    monkeypatch.setattr(engine.prompts, "_tokenizer", counting)
    return counting


def chat(text: str = LONG, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/chat/completions", chat("a", tools=TOOLS)),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 1}),
        ("/v1/completions", {"prompt": ["a", LONG], "max_tokens": 1, "echo": True}),
        ("/tokenize", chat(LONG * 6)),
        ("/v1/check/chat/completions", chat()),
        ("/v1/check/completions", {"prompt": LONG}),
    ],
    ids=["chat", "tools", "completion", "batch", "tokenize", "check", "check of a completion"],
)  # fmt: skip
def test_c21_a_text_far_beyond_the_context_is_refused_before_it_is_tokenized(
    real_worker: RunningWorker, tokenizer: CountingTokenizer, path: str, body: dict[str, Any]
) -> None:
    response = httpx.post(
        f"{real_worker.url}{path}", json={"model": real_worker.model, **body}, timeout=60
    )
    assert status_and_code(response) == (400, "context_length_exceeded"), response.text
    assert "maximum context length is 32768 tokens" in response.json()["error"]["message"]
    assert tokenizer.chars < len(json.dumps(body)) // 2


def test_the_refusal_tells_about_how_many_tokens_the_text_has(prompt_renderer) -> None:
    text = LONG[:200_000]
    tokens = len(prompt_renderer._tokenize(text))
    with pytest.raises(InvalidGeneration) as refused:
        PromptRenderer(prompt_renderer._processor, 1024).prepare(Prompt(text=text))
    told = int(refused.value.message.split("resulted in ")[1].split(" ")[0])
    assert tokens * 0.9 < told < tokens * 1.1


def test_c21_a_prompt_that_is_to_be_cut_is_tokenized_from_its_end(
    engine: Engine, real_worker: RunningWorker, tokenizer: CountingTokenizer
) -> None:
    """The tokens are those at the end of the whole text."""
    text = LONG[:200_000]
    whole = engine.prompts._tokenize(text)
    tokenizer.chars = 0
    for limit in (1, 100, 5000):
        assert engine.prompts.prepare(Prompt(text=text), limit).tokens == whole[-limit:]
        assert engine.prompts.tokenize_completion(text, limit)[-limit:] == whole[-limit:]
    for path, body in (("chat/completions", chat()), ("completions", {"prompt": LONG})):
        answer = httpx.post(
            f"{real_worker.url}/v1/{path}",
            json={"model": real_worker.model, **body, "truncate_prompt_tokens": 9, "max_tokens": 1},
            timeout=60,
        )
        assert answer.json()["usage"]["prompt_tokens"] == 9
    assert tokenizer.chars < len(LONG)


def test_tokens_beyond_the_context_are_counted_as_before(real_worker: RunningWorker) -> None:
    counted = httpx.post(
        f"{real_worker.url}/tokenize",
        json={"model": real_worker.model, **chat(LONG[:200_000])},
        timeout=60,
    ).json()
    assert counted["count"] > counted["max_model_len"] == 32_768


class LongThread(ThreadPoolExecutor):
    """The thread of long texts, which waits for the test."""

    def __init__(self) -> None:
        super().__init__(1)
        self.free = threading.Event()
        self.submitted: list[Future[Any]] = []
        self.submit(self.free.wait)

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        self.submitted.append(super().submit(work, *args, **options))
        return self.submitted[-1]


@pytest.fixture
def long_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[LongThread]:
    thread = LongThread()
    monkeypatch.setattr(long_text, "_LONG", thread)
    yield thread
    thread.free.set()
    thread.shutdown()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_c21_a_long_text_whose_client_has_left_is_not_tokenized(
    real_worker: RunningWorker, tokenizer: CountingTokenizer, long_thread: LongThread, path: str
) -> None:
    """It waits for another one; a short one waits for none."""
    text = LONG[:300_000]
    body = {"model": real_worker.model, **chat(text)}
    with raw_client(cast("Any", real_worker)) as client:
        client.send(request_bytes(json.dumps(body).encode(), path=path))
        wait_until(lambda: len(long_thread.submitted) == 2)
        short = {"model": real_worker.model, **chat("Hello")}
        url = f"{real_worker.url}/v1/chat/completions"
        assert httpx.post(url, json=short, timeout=60).status_code == 200
    wait_until(long_thread.submitted[1].cancelled)
    long_thread.free.set()
    long_thread.submit(int).result()
    assert tokenizer.chars < len(text)


async def test_long_texts_are_read_one_at_a_time() -> None:
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        pieces = "The red fox. " * 1000
        assert chars_beyond(pieces * 100, 10, lambda piece: len(piece.split()))
        running -= 1

    await asyncio.gather(*(in_turn(1 << 20, work) for _ in range(20)))
    assert most == 1


def test_what_may_fit_is_never_beyond() -> None:
    """A run of spaces, or of unknown characters, may be one token."""
    assert chars_beyond(" " * 10 * PIECE_CHARS, 512, lambda _: 1) is None
    assert chars_beyond("a " * 100, 1, len) is None


@pytest.mark.parametrize("truncate", [False, True])
def test_c21_an_embedder_tokenizes_no_more_than_its_context(tmp_path, *, truncate) -> None:
    folder = write_bert_embedder(tmp_path / "bge")
    embedder = load_pooling_model(folder, Endpoint.EMBEDDINGS)
    assert isinstance(embedder, Embedder)
    counting = CountingBatches(embedder._tokenizer)
    embedder._tokenizer = counting
    long = "the cat sat " * 20_000
    rows = embedder.rows([long, "a dog", long], truncate=truncate)
    assert counting.chars < len(long)
    assert [len(row.tokens) > embedder.context_tokens for row in rows] == (
        [False] * 3 if truncate else [True, False, True]
    )
    short = embedder.rows([long[: 2 * PIECE_CHARS // 3], "a dog"], truncate=truncate)
    assert [*rows[1].tokens] == [*short[1].tokens]
    if truncate:
        assert [*rows[0].tokens] == [*short[0].tokens]


def test_c21_a_reranker_tokenizes_no_more_than_its_context(tmp_path: Path) -> None:
    model: Any = load_pooling_model(write_bert_cross_encoder(tmp_path / "ms"), Endpoint.RERANK)
    model._tokenizer = counting = CountingBatches(model._tokenizer)
    long = "the cat sat " * 20_000
    cut = {"document_tokens": 5, "truncate": False}
    first, second = model.rows("cat", ["the cat sat on", long], **cut)
    assert len(first.tokens) < len(second.tokens)
    assert counting.chars < len(long)
    (beyond,) = model.rows(long, ["cat"], document_tokens=None, truncate=True)
    assert len(beyond.tokens) > model.context_tokens


class CountingBatches(CountingTokenizer):
    """The same of the `tokenizers` package."""

    def encode(self, text: str, **options: Any) -> Any:
        self.chars += len(text)
        return self._tokenizer.encode(text, **options)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.chars += sum(map(len, texts))
        return self._tokenizer.encode_batch(texts, **options)
