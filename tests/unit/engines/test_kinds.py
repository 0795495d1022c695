"""What each kind of engine is sent, what its answers tell, and what the gateway remembers of it."""

import json
from typing import Any

import pytest

from gateway.engines import KINDS
from gateway.engines.base import HttpAnswer, Question
from gateway.engines.ollama import Ollama
from gateway.routing.features import LACKS, Feature
from gateway.types import Drafts

MLX = ("mlx-lm", "mlx-vlm", "vllm-mlx")


def sent(kind: str, **fields: Any) -> dict[str, Any]:
    (raw,) = KINDS[kind]().body((), {"model": "demo", **fields}, "")
    body: dict[str, Any] = json.loads(raw)
    del body["model"]
    return body


@pytest.mark.parametrize("kind", MLX)
def test_engines_of_mlx_get_no_top_k_of_the_whole_vocabulary_and_no_token_ids(kind: str) -> None:
    """One such request ends `mlx_lm.server` and breaks vllm-mlx until it is started again.

    An id beyond the vocabulary, in `logit_bias`, ends `mlx_lm.server` and `mlx_vlm.server`.
    """
    assert sent(kind, top_k=31_999) == {"top_k": 31_999}
    assert sent(kind, top_k=32_000) == {}
    assert sent(kind, top_k=10**9, seed=None) == {"seed": None}
    assert {Feature.LOGIT_BIAS, Feature.STOP_TOKENS} <= LACKS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_only_paceline_goes_on_from_a_last_message(kind: str) -> None:
    """Others write a new answer behind it, and their clients would never know."""
    assert (Feature.CONTINUATION in LACKS[kind]) == (kind != "paceline")


def test_mlx_lm_gets_no_negative_seed() -> None:
    """It closes the connection at one, as if it had died."""
    for seed, expected in ((-1, 2**63 - 1), (7, 7), (None, None)):
        assert sent("mlx-lm", seed=seed) == {"seed": expected}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "paceline"])
def test_a_schema_beside_json_object_reaches_engines_where_they_read_it(kind: str) -> None:
    """Most engines read it in a `json_schema` alone, and would ignore it in silence."""
    schema = {"type": "object", "properties": {}}
    form = sent(kind, response_format={"type": "json_object", "schema": schema})["response_format"]
    assert form == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    plain = {"type": "json_object"}
    assert sent(kind, response_format=plain) == {"response_format": plain}


USAGE = {"prompt_tokens": 12, "completion_tokens": 3}
DRAFTED = {"draft_n": 6, "draft_n_accepted": 4, "predicted_n": 9}


@pytest.mark.parametrize(
    ("kind", "answer", "cached"),
    [
        ("omlx", {"usage": {**USAGE, "cached_tokens": 8}}, 8),
        ("omlx", {"usage": USAGE}, None),
        ("llama.cpp", {"usage": USAGE, "timings": {"cache_n": 8}}, 8),
        ("llama.cpp", {"usage": USAGE, "timings": {"cache_n": 99}}, 12),
        ("llama.cpp", {"usage": USAGE, "timings": {}}, None),
        ("ollama", {"usage": USAGE}, None),
        ("mlx-lm", {"usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 0}}}, 0),
    ],
)
def test_cached_tokens_are_read_where_a_kind_tells_them(kind, answer, cached) -> None:
    usage = KINDS[kind]().usage(answer)
    assert usage is not None
    assert (usage.cached_tokens if usage.cached_known else None) == cached


@pytest.mark.parametrize(
    ("timings", "drafts"),
    [
        ({**DRAFTED, "draft_rounds": 3}, Drafts(3, 6, 4, ())),
        (DRAFTED, Drafts(5, 6, 4, ())),
        ({"draft_n": None, "predicted_n": 9}, None),
        ({"draft_n": 1, "draft_n_accepted": 2}, None),
        ({"draft_n": "many", "draft_n_accepted": -1}, Drafts(0, 0, 0, ())),
        ([], None),
    ],
)
@pytest.mark.parametrize("kind", ["llama.cpp", "mlx-vlm"])
def test_drafts_are_read_from_timings(kind: str, timings: object, drafts: Drafts | None) -> None:
    assert KINDS[kind]().drafts({"timings": timings}) == drafts


@pytest.mark.parametrize(
    ("metadata", "drafts"),
    [
        ({"mtp_drafts": 5, "mtp_accepted": 3}, Drafts(5, 5, 3, (2, 3))),
        ({"mtp_drafts": None, "mtp_accepted": None}, None),
        ({"mtp_drafts": 1, "mtp_accepted": 2}, None),
        ({"mtp_drafts": "many"}, Drafts(0, 0, 0, (0, 0))),
        (None, None),
    ],
)
def test_drafts_of_vllm_mlx_stand_beside_an_answer(metadata: object, drafts: Drafts | None) -> None:
    assert KINDS["vllm-mlx"]().drafts({"generation_metadata": metadata}) == drafts


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("answer", [{}, {"choices": 7}, {"choices": [7, {"delta": []}]}])
def test_no_reader_fails_at_an_answer_of_another_shape(kind: str, answer: dict[str, Any]) -> None:
    engine = KINDS[kind]()
    assert engine.usage(answer) is None
    assert engine.drafts(answer) is None


async def test_a_server_that_tells_ever_new_digests_takes_no_more_memory() -> None:
    engine = Ollama()
    shown = []
    digests = [f"digest-{number}" for number in (*range(100), 99)]
    left = iter(digests)

    async def ask(question: Question) -> HttpAnswer:
        if question.path == "/api/show":
            shown.append(question)
        told: dict[str, object] = {}
        if question.path == "/api/tags":
            told = {"models": [{"name": "qwen", "digest": next(left)}]}
        return HttpAnswer(200, {}, json.dumps(told))

    for _ in digests:
        assert [one.name for one in (await engine.read(ask)).models] == ["qwen"]
    assert len(engine._abilities) == 1
    assert len(shown) == 100, "a digest that is still listed is not asked for again"
