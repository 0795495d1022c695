"""What the answers of each kind tell: usage, cached tokens, drafts, and reasoning."""

from typing import Any

import pytest

from gateway.engines import KINDS
from gateway.types import Drafts

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
