"""Embeddings and rerank through a gateway: routes, bodies for workers, answers and errors."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.config.static_workers import StaticWorker
from policies.document import default_policy
from tests.support.policies import gateway_with_policy
from tests.support.running_gateway import RunningGateway, running_worker, said, status_and_code
from tests.support.scripted_worker import Script, ScriptedWorker

VECTORS = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
    "model": "bge",
    "usage": {"prompt_tokens": 5, "total_tokens": 5},
}
RANKING = {
    "model": "reranker",
    "results": [
        {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
        {"index": 0, "relevance_score": 0.1, "document": {"text": "a"}},
    ],
    "usage": {"prompt_tokens": 9, "total_tokens": 9},
}
RANK: dict[str, Any] = {"model": "reranker", "query": "q", "documents": ["a", {"text": "b"}]}


def script(answer: Any) -> Script:
    return Script(body=json.dumps(answer).encode())


class Fleet(NamedTuple):
    """A gateway with a worker that chats, an embedder and a reranker."""

    gateway: RunningGateway
    embedder: ScriptedWorker
    reranker: ScriptedWorker

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.gateway.client.post(path, json=body)


@pytest.fixture
def embedder() -> Iterator[ScriptedWorker]:
    fields = {"model": "bge", "lanes": ("embeddings",), "script": script(VECTORS)}
    with running_worker("embedder", **fields) as scripted:
        yield scripted


@pytest.fixture
def fleet(gateway_with_worker: RunningGateway, embedder: ScriptedWorker) -> Iterator[Fleet]:
    fields = {"model": "reranker", "lanes": ("rerank",), "script": script(RANKING)}
    with running_worker("reranker", **fields) as reranker:
        for scripted in (embedder, reranker):
            gateway_with_worker.join(scripted)
        yield Fleet(gateway_with_worker, embedder, reranker)


def test_vectors_come_from_the_embedder_as_it_sends_them(fleet: Fleet) -> None:
    answer = fleet.post("/v1/embeddings", model="bge", input=[[1, 2]], dimensions=2, user=None)
    assert answer.json() == VECTORS
    assert answer.headers["x-paceline-worker"] == "embedder"
    [request] = fleet.embedder.requests
    assert request.path == "/v1/embeddings"
    assert request.body == {"model": "bge", "input": [[1, 2]], "dimensions": 2}
    assert request.headers["x-paceline-lane"] == "embeddings"


def test_a_ranking_has_jinas_shape_or_coheres(fleet: Fleet) -> None:
    assert fleet.post("/v1/rerank", **RANK, top_n=2).json() == RANKING
    cohere = fleet.post("/v2/rerank", **RANK, priority=3)
    tokens = {"input_tokens": 9, "output_tokens": 0}
    meta = {"api_version": {"version": "2"}, "tokens": tokens}
    assert cohere.json() == {"results": RANKING["results"], "meta": meta}
    jina, translated = (request.body for request in fleet.reranker.requests)
    assert jina == {**RANK, "top_n": 2}
    defaults = {"truncate": True, "return_documents": False, "max_tokens_per_doc": 4096}
    assert translated == {**RANK, "priority": 3, **defaults}
    assert {request.path for request in fleet.reranker.requests} == {"/v1/rerank"}


def test_a_model_that_does_not_serve_an_endpoint_is_a_400_with_a_code(fleet: Fleet) -> None:
    unsuited: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("/v1/embeddings", "demo", {"input": "x"}),
        ("/v1/embeddings", "reranker", {"input": "x"}),
        ("/v1/rerank", "bge", {"query": "q", "documents": ["d"]}),
        ("/v1/rerank", "demo", {"query": "q", "documents": ["d"]}),
        ("/v1/chat/completions", "bge", said("x")),
        ("/v1/completions", "reranker", {"prompt": "x"}),
        ("/v1/responses", "bge", {"input": "x"}),
    )
    for path, model, fields in unsuited:
        response = fleet.post(path, model=model, **fields)
        assert status_and_code(response) == (400, "model_not_supported"), path
        assert response.json()["error"]["param"] == "model"


def test_the_errors_of_each_format_have_its_shape(fleet: Fleet) -> None:
    for path in ("/v1/rerank", "/v2/rerank"):
        unknown = fleet.post(path, **RANK | {"model": "nothing"})
        assert status_and_code(unknown) == (404, "model_not_found")
    assert unknown.json()["message"] == unknown.json()["error"]["message"]
    refused = fleet.post("/v1/messages", model="bge", max_tokens=1, **said("x"))
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert fleet.gateway.client.get("/v1/embeddings").status_code == 405


INVALID: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
    ("/v1/embeddings", {"input": ["a", [1, -1]]}, "input[1]"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "stream": True}, "stream"),
    ("/v1/embeddings", {"input": ["a" * 5000] * 2000}, "input"),
    ("/v1/rerank", {"documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "q", "documents": ["a", {"title": "b"}]}, "documents[1]"),
    ("/v1/rerank", {"query": "q" * 9000, "documents": ["a"] * 1000}, "documents"),
    ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ("/v2/rerank", {"query": "q", "documents": ["a"], "input": "x"}, "input"),
    ("/v2/rerank", {**RANK, "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
)


def test_an_invalid_field_is_named_and_reaches_no_worker(fleet: Fleet) -> None:
    for path, fields, param in INVALID:
        model = "bge" if path == "/v1/embeddings" else "reranker"
        response = fleet.post(path, **{"model": model, **fields})
        found = response.json()["error"]["param"]
        assert (response.status_code, found) == (400, param), (path, param)
    assert [*fleet.embedder.requests, *fleet.reranker.requests] == []


def test_an_answer_without_vectors_or_ranking_is_an_error_of_the_worker(fleet: Fleet) -> None:
    answers: tuple[Any, ...] = ({"error": {"message": "no"}}, {"choices": [{}]}, {"data": []})
    for answer in answers:
        fleet.embedder.script = script(answer)
        failed = fleet.post("/v1/embeddings", model="bge", input="x")
        assert status_and_code(failed) == (502, "worker_failed")
    fleet.reranker.script = script({"results": ["first"]})
    assert status_and_code(fleet.post("/v2/rerank", **RANK)) == (502, "worker_failed")


def test_default_is_the_one_model_that_serves_the_endpoint(fleet, worker) -> None:
    assert fleet.post("/v1/embeddings", model="default", input="x").status_code == 200
    assert fleet.embedder.requests[-1].body["model"] == "bge"
    assert fleet.gateway.chat(model="default").status_code == 200
    assert worker.requests[-1].body["model"] == "demo"


def test_models_are_listed_with_what_they_serve(fleet: Fleet) -> None:
    listed = {one["id"]: one for one in fleet.gateway.client.get("/v1/models").json()["data"]}
    endpoints = {name: one["endpoints"] for name, one in listed.items()}
    assert endpoints["bge"] == ["embeddings"]
    assert endpoints["reranker"] == ["rerank"]
    assert endpoints["demo"] == endpoints["default"] == ["chat", "completions"]
    headers = {"anthropic-version": "2023-06-01"}
    chats = fleet.gateway.client.get("/v1/models", headers=headers).json()["data"]
    assert "demo" in [one["id"] for one in chats]
    assert "bge" not in [one["id"] for one in chats]


def test_a_key_pays_the_tokens_that_the_worker_reports(fleet: Fleet) -> None:
    fleet.gateway.use_key(fleet.gateway.create_key(tokens_a_day=1000)["secret"])
    first, second = (fleet.post("/v1/embeddings", model="bge", input="x" * 30) for _ in range(2))
    # 10 tokens of text and 16 for what a model puts around it are reserved, and 5 are paid.
    assert first.headers["x-ratelimit-remaining-tokens"] == str(1000 - 26)
    assert second.headers["x-ratelimit-remaining-tokens"] == str(1000 - 26 - 5)
    assert fleet.embedder.requests[-1].headers["x-paceline-token-limit"] == "26"
    large = fleet.post("/v1/rerank", **RANK | {"query": "x" * 3000})
    assert status_and_code(large) == (400, "tokens_over_limit")


def test_a_policy_routes_by_the_endpoint(embedder, worker, tmp_path) -> None:
    routes = [
        {"name": "vectors", "when": {"endpoint": "embeddings"}, "to": ["small"]},
        {"name": "texts", "when": {"endpoint": ["completions", "rerank"]}, "to": ["vlm"]},
        {"name": "rest", "to": ["vlm"]},
    ]
    pools = {"small": {"lanes": ["embeddings"]}, "vlm": {"lanes": ["vlm", "embeddings"]}}
    with gateway_with_policy(tmp_path, embedder, worker, routes=routes, pools=pools) as gateway:
        answer = gateway.client.post("/v1/embeddings", json={"model": "bge", "input": "x"})
        assert answer.headers["x-paceline-pool"] == "small"
        for model, field, route, pool, endpoint in (
            ("bge", "input", "vectors", "small", "embeddings"),
            ("demo", "prompt", "texts", "vlm", "completions"),
            ("demo", "input", "rest", "vlm", "chat"),
        ):
            asked = {"model": model, field: "x"}
            told = gateway.client.post("/v1/route/explain", json=asked).json()
            found = (told["route"], told["pool"], told["profile"]["endpoint"])
            assert found == (route, pool, endpoint)


def test_a_server_of_another_kind_gets_what_it_knows(tmp_path, embedder) -> None:
    static = StaticWorker(
        id="vllm", kind="openai", url=embedder.url, models=("bge",), pools=("embeddings",), slots=2
    )
    policy = default_policy().model_dump(mode="json")
    with gateway_with_policy(tmp_path, static_workers=(static,), **policy) as gateway:
        body = {"model": "bge", "input": "x", "truncate": True, "encoding_format": "float"}
        assert gateway.client.post("/v1/embeddings", json=body).status_code == 200
        del body["truncate"]
        assert embedder.requests[-1].body == body
        assert status_and_code(gateway.chat(model="bge")) == (400, "model_not_supported")
