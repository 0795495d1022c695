"""What each kind of engine is sent: no value of a client may end it."""

import json
from typing import Any

import pytest

from gateway.engines import KINDS
from gateway.routing.features import LACKS, Feature

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
