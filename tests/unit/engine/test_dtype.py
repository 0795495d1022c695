"""The type of the weights on each generation of Apple's chips."""

import pytest

from workers.engine.model import choose_dtype
from workers.engine.types import WeightType


@pytest.mark.parametrize(
    ("architecture", "family", "expected"),
    [
        ("applegpu_g13g", "qwen3", WeightType.FLOAT16),
        ("applegpu_g14s", "qwen3", WeightType.FLOAT16),
        ("applegpu_g14s", "gemma3", None),
        ("applegpu_g15s", "qwen3", None),
        ("applegpu_g17g", "qwen3", None),
        ("air64_v26", "qwen3", None),
        ("", "qwen3", None),
    ],
)
def test_auto_is_float16_where_bfloat16_has_no_arithmetic(
    architecture: str, family: str, expected: WeightType | None
) -> None:
    assert choose_dtype(WeightType.AUTO, family, architecture) is expected


def test_a_named_type_applies_everywhere() -> None:
    assert choose_dtype(WeightType.BFLOAT16, "gemma3", "applegpu_g13g") is WeightType.BFLOAT16
    assert choose_dtype(None, "qwen3", "applegpu_g13g") is None
