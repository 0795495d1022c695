"""The type of the weights on each generation of Apple's chips."""

import pytest

from workers.engine.model.checkpoint import choose_dtype
from workers.engine.types import WeightType

F16 = WeightType.FLOAT16


@pytest.mark.parametrize(
    ("architecture", "family", "named", "expected"),
    [
        *((f"applegpu_{chip}", "qwen3", WeightType.AUTO, F16) for chip in ("g13g", "g14s")),
        ("applegpu_g14s", "gemma3", WeightType.AUTO, None),
        *(
            (architecture, "qwen3", WeightType.AUTO, None)
            for architecture in ("applegpu_g15s", "applegpu_g17g", "air64_v26", "")
        ),
        ("applegpu_g13g", "gemma3", WeightType.BFLOAT16, WeightType.BFLOAT16),
        ("applegpu_g13g", "qwen3", None, None),
    ],
)
def test_auto_is_float16_where_bfloat16_has_no_arithmetic(
    architecture: str, family: str, named: WeightType | None, expected: WeightType | None
) -> None:
    assert choose_dtype(named, family, architecture) is expected
