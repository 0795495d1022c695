"""Embeddings and rerank of real workers behind a gateway, asked by the `openai` package."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from openai.types import CreateEmbeddingResponse

from paceline.protocol import TOKENS_HEADER, TOKENS_LIMIT_HEADER
from tests.support.maker_types import read_strictly
from tests.support.pooling_checkpoints import (
    CONTEXT_TOKENS,
    DIMENSIONS,
    write_bert_cross_encoder,
    write_qwen3_embedding,
)
from tests.support.pooling_reference import qwen3_states, unit
from tests.support.raw_client import raw_client, request_bytes
from tests.support.running_gateway import RunningGateway, status_and_code, wait_until
from tests.support.scripted_worker import JOIN_TOKEN
from tests.support.served_engine import ServedWorker, running_gateway, served
from workers.model_source import resolve_model
from workers.server.engines import RunningEngine
from workers.server.main import read_settings
from workers.server.start import announce, load_engine

EMBEDDER, RERANKER = "Qwen3-Embedding-tiny", "ms-marco-tiny"
TEXTS = ["the cat sat", "paris is the capital of france"]
QUERY = "what is the capital of france"


@dataclass(frozen=True)
class Stack:
    gateway: RunningGateway
    embedder: ServedWorker
    reranker: ServedWorker
    folder: Path
    """Of the embedder."""

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.gateway.client.post(path, json=body)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    models = tmp_path_factory.mktemp("models")
    folders = [
        write_qwen3_embedding(models / EMBEDDER),
        write_bert_cross_encoder(models / RERANKER),
    ]
    with contextlib.ExitStack() as running:
        gateway = running.enter_context(running_gateway(tmp_path_factory.mktemp("gateway")))
        embedder, reranker = (
            running.enter_context(
                served(engine_of(running, folder), folder.name.lower(), join=gateway.url)
            )
            for folder in folders
        )
        wait_until(lambda: len(served_models(gateway)) == 2)
        gateway.use_key(gateway.create_key(tokens_a_day=10_000_000)["secret"])
        yield Stack(gateway, embedder, reranker, folders[0])


def engine_of(running: contextlib.ExitStack, folder: Path) -> RunningEngine:
    """Return the engine that a worker with this `--model` runs."""
    settings, source = read_settings(["--model", str(folder)]), resolve_model(str(folder))
    engine = load_engine(settings, source, None, (None, b""), lambda *_: None)
    running.callback(engine.stop)
    return engine


def served_models(gateway: RunningGateway) -> dict[str, list[str]]:
    listed = gateway.client.get("/v1/models").json()["data"]
    return {one["id"]: one["endpoints"] for one in listed if one["id"] == one["root"]}


def test_the_openai_package_reads_vectors_in_every_form(stack: Stack) -> None:
    key = stack.gateway.client.headers["authorization"].removeprefix("Bearer ")
    with OpenAI(base_url=f"{stack.gateway.url}/v1", api_key=key, max_retries=0) as client:
        packed = client.embeddings.create(model=EMBEDDER, input=TEXTS)  # base64 unless told
        plain = client.embeddings.create(model=EMBEDDER, input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model=EMBEDDER, input=TEXTS[0], dimensions=8)
        assert np.allclose(packed.data[1].embedding, plain.data[1].embedding, atol=1e-7)
        whole = np.array(packed.data[0].embedding)
        assert len(whole) == DIMENSIONS
        assert np.allclose(short.data[0].embedding, unit(whole[:8]), atol=1e-6)

        # A token for each letter, and the mark at the end of each text.
        assert packed.usage.prompt_tokens == sum(map(len, TEXTS)) + len(TEXTS)
        tokens = [ord(letter) - 33 for letter in "cat"]
        given = client.embeddings.create(model=EMBEDDER, input=[tokens], encoding_format="float")
        expected = unit(qwen3_states(stack.folder, tokens)[-1])
        assert np.allclose(given.data[0].embedding, expected, atol=2e-5)
        assert given.usage.prompt_tokens == len(tokens)
        with pytest.raises(BadRequestError) as refused:
            client.embeddings.create(model=EMBEDDER, input="x", dimensions=DIMENSIONS + 1)
        assert refused.value.param == "dimensions"


def test_an_answer_has_the_fields_of_openai_and_no_other(stack: Stack) -> None:
    answer = stack.post("/v1/embeddings", model=EMBEDDER, input=TEXTS, user="ann")
    read = read_strictly(CreateEmbeddingResponse, answer.json())
    assert [one.index for one in read.data] == [0, 1]
    headers = answer.headers
    assert headers["x-paceline-worker"] == EMBEDDER.lower()
    assert (headers["x-paceline-pool"], headers["x-paceline-reason"]) == ("embeddings", "endpoint")
    assert headers["x-paceline-ignored"] == "user"


def test_documents_are_ranked_in_the_shapes_of_jina_and_cohere(stack: Stack) -> None:
    documents = ["the cat sat", {"text": "paris is the capital of france"}, "berlin"]
    asked = {"model": RERANKER, "query": QUERY, "documents": documents}
    jina = stack.post("/v1/rerank", **asked).json()
    scores = [one["relevance_score"] for one in jina["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    texts = ["the cat sat", "paris is the capital of france", "berlin"]
    assert [one["document"]["text"] for one in jina["results"]] == [
        texts[one["index"]] for one in jina["results"]
    ]
    read_tokens = sum(3 + len(QUERY.split()) + len(text.split()) for text in texts)
    assert jina["usage"] == {"prompt_tokens": read_tokens, "total_tokens": read_tokens}

    bare = stack.post("/v1/rerank", **asked, top_n=1, return_documents=False).json()
    first = {name: jina["results"][0][name] for name in ("index", "relevance_score")}
    assert bare["results"] == [first]

    cohere = stack.post("/v2/rerank", **asked, top_n=2).json()
    assert [one["index"] for one in cohere["results"]] == [
        one["index"] for one in jina["results"][:2]
    ]
    assert set(cohere["results"][0]) == {"index", "relevance_score"}
    assert cohere["meta"]["tokens"]["input_tokens"] == read_tokens


def test_a_text_that_is_too_long_is_refused_or_cut(stack: Stack) -> None:
    long = "x" * (CONTEXT_TOKENS + 1)
    refused = stack.post("/v1/embeddings", model=EMBEDDER, input=["a", long])
    assert status_and_code(refused) == (400, "context_length_exceeded")
    assert refused.json()["error"]["param"] == "input[1]"
    cut = stack.post("/v1/embeddings", model=EMBEDDER, input=long, truncate=True)
    assert cut.json()["usage"]["prompt_tokens"] == CONTEXT_TOKENS

    ranked = {"model": RERANKER, "query": QUERY, "documents": ["cat " * CONTEXT_TOKENS]}
    assert status_and_code(stack.post("/v1/rerank", **ranked)) == (400, "context_length_exceeded")
    assert stack.post("/v2/rerank", **ranked).status_code == 200
    per_document = stack.post("/v2/rerank", **ranked, max_tokens_per_doc=5).json()
    tokens = per_document["meta"]["tokens"]["input_tokens"]
    assert tokens == 3 + len(QUERY.split()) + 5


def test_a_model_is_asked_only_for_what_it_serves(stack: Stack) -> None:
    assert served_models(stack.gateway) == {EMBEDDER: ["embeddings"], RERANKER: ["rerank"]}
    for path in ("/v1/chat/completions", "/v1/rerank"):
        url = f"{stack.embedder.url}{path}"
        refused = httpx.post(url, json={}, headers=token(), timeout=60)
        assert status_and_code(refused) == (400, "model_not_supported")


def token() -> dict[str, str]:
    return {"authorization": f"Bearer {JOIN_TOKEN}"}


def test_a_worker_checks_its_token_and_tells_its_state(stack, capsys) -> None:
    url = stack.embedder.url
    assert httpx.post(f"{url}/v1/embeddings", json={}, timeout=60).status_code == 401
    assert httpx.get(f"{url}/readyz", headers=token(), timeout=60).status_code == 200
    metrics = httpx.get(f"{url}/metrics", headers=token(), timeout=60).text
    assert f'paceline_worker_slots{{lane="embeddings",model_name="{EMBEDDER}"}} 32.0' in metrics
    announce(stack.embedder.worker, resolve_model(str(stack.folder)), stack.gateway.url)
    assert f"It returns vectors of {DIMENSIONS} numbers" in capsys.readouterr().out
    assert stack.embedder.lanes == ("embeddings",)
    assert stack.reranker.lanes == ("rerank",)


def test_explain_checks_a_request_at_the_worker(stack: Stack) -> None:
    explained = stack.post("/v1/route/explain", model=EMBEDDER, input=TEXTS).json()
    assert (explained["route"], explained["pool"], explained["checked"]) == (
        *("embeddings", "embeddings"),
        True,
    )
    assert explained["prompt_tokens"] == sum(map(len, TEXTS)) + len(TEXTS)
    ranked = {"model": RERANKER, "query": QUERY, "documents": ["cat " * CONTEXT_TOKENS]}
    refused = stack.post("/v1/route/explain", **ranked).json()
    assert (refused["route"], refused["servable"]) == ("rerank", False)
    assert refused["refusal"]["code"] == "context_length_exceeded"


def test_a_worker_reads_no_more_than_the_gateway_allows(stack: Stack) -> None:
    body = {"model": EMBEDDER, "input": "0123456789"}
    headers = {**token(), TOKENS_LIMIT_HEADER: "5"}
    refused = httpx.post(
        f"{stack.embedder.url}/v1/embeddings", json=body, headers=headers, timeout=60
    )
    assert status_and_code(refused) == (400, "tokens_over_limit")
    assert refused.headers[TOKENS_HEADER] == "11"


def test_a_client_that_leaves_ends_its_request(stack, monkeypatch) -> None:
    worker = stack.embedder.worker
    engine: Any = worker.engine
    model, forward = engine._model, engine._model.forward
    begun, left = threading.Event(), threading.Event()

    def forward_until_left(rows: list[Any]) -> Any:
        begun.set()
        assert left.wait(60)
        return forward(rows)

    monkeypatch.setattr(model, "forward", forward_until_left)
    (before,) = engine.lane_reports()
    body = json.dumps({"model": EMBEDDER, "input": ["x" * 60] * 512}).encode()
    with raw_client(stack.gateway) as client:
        key = stack.gateway.client.headers["authorization"].encode()
        head = request_bytes(body, path="/v1/embeddings")
        client.send(head.replace(b"\r\n", b"\r\nauthorization: " + key + b"\r\n", 1))
        assert begun.wait(60)
    wait_until(lambda: worker.traffic.in_flight == 0)
    left.set()
    wait_until(lambda: engine.lane_reports()[0].running == 0)
    (after,) = engine.lane_reports()
    assert after.requests == before.requests + 1
    assert 0 < after.prompt_tokens - before.prompt_tokens < 512 * 61, "it ends behind its batch"
    assert stack.post("/v1/embeddings", model=EMBEDDER, input="the cat").status_code == 200
