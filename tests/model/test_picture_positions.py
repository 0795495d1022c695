"""Pictures of families with three-dimensional positions, in single rows and in batches.

The models are tiny with random weights, so their answers mean nothing; each answer must equal the
one that mlx-vlm computes without a cache, from the whole text for every token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models import ernie4_5_moe_vl, glm4v, glm_ocr, paddleocr_vl, qwen2_5_vl, qwen3_vl

from tests.support.engine_lane import run_until_idle
from workers.engine.model.target import Target
from workers.engine.text.tokenizer import PreparedPrompt

START, PICTURE, END = 1500, 1501, 1502
PATCHES_HIGH, PATCHES_WIDE = 4, 8
PATCHES = PATCHES_HIGH * PATCHES_WIDE
TOKENS = 12

MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
TEXT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 1536, "head_dim": 16,
    "rope_theta": 1000.0, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "rope_scaling": MROPE, "rope_parameters": MROPE, "use_bias": False, "eos_token_id": [0],
    "mrope_section": [2, 2, 4], "freq_allocation": 4, "moe_num_experts": 2, "moe_k": 1,
    "moe_layer_start_index": 2, "moe_layer_end_index": 2, "moe_capacity": [2, 2, 2],
}  # fmt: skip
VISION = {
    "depth": 2, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
    "num_attention_heads": 2, "out_hidden_size": 64, "image_size": 32, "patch_size": 4,
    "spatial_patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0], "num_position_embeddings": 64, "embed_dim": 32,
}  # fmt: skip
TOKEN_IDS = {
    "vocab_size": 1536, "image_token_id": PICTURE, "image_token_index": PICTURE,
    "video_token_id": 1503, "vision_start_token_id": START, "vision_end_token_id": END,
    "image_start_token_id": START, "image_end_token_id": END, "im_patch_id": PICTURE,
    "pixel_hidden_size": 32, "hidden_size": 64,
}  # fmt: skip
FAMILIES = (qwen2_5_vl, qwen3_vl, glm4v, glm_ocr, paddleocr_vl, ernie4_5_moe_vl)
FAMILY_TEXT: dict[Any, dict[str, Any]] = {
    paddleocr_vl: {"hidden_size": 1024},  # the only width that its projector supports
    ernie4_5_moe_vl: {"rope_scaling": None, "rope_parameters": None},  # only `mrope_section`
}
PIXELS = {paddleocr_vl: (1, PATCHES, 3, 4, 4), ernie4_5_moe_vl: (PATCHES, 3 * 4 * 4)}


def family_name(family: Any) -> str:
    return str(family.__name__.rsplit(".", 1)[-1])


@pytest.fixture(scope="module", params=FAMILIES, ids=family_name)
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def target(family: Any) -> Target:
    def config(kind: Any, values: dict[str, Any]) -> Any:
        """Omit the values for which this family has no field."""
        candidates = {**values, "model_type": family_name(family)}.items()
        return kind(**{key: value for key, value in candidates if key in kind.__dataclass_fields__})

    mx.random.seed(7)
    parts = {
        "text_config": config(family.TextConfig, TEXT | FAMILY_TEXT.get(family, {})),
        "vision_config": config(family.VisionConfig, VISION),
    }
    model = family.Model(config(family.ModelConfig, TOKEN_IDS | parts))
    model.eval()
    mx.eval(model.parameters())
    return Target(model)


def text(first: int, length: int) -> PreparedPrompt:
    return PreparedPrompt(tokens=tuple(20 + (first + 37 * i) % 1200 for i in range(length)))


def picture(shape: Sequence[int], seed: int, before: int, after: int) -> PreparedPrompt:
    """Return a picture of 4 x 8 patches, which are 2 x 4 tokens, between two texts."""
    pixels = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    picture_tokens = (START, *[PICTURE] * (PATCHES // 4), END)
    return PreparedPrompt(
        tokens=(*text(seed, before).tokens, *picture_tokens, *text(seed + 1, after).tokens),
        media={
            "pixel_values": pixels,
            "image_grid_thw": np.array([[1, PATCHES_HIGH, PATCHES_WIDE]], dtype=np.int32),
        },
    )


def decode_without_cache(target: Target, prompt: PreparedPrompt, count: int) -> list[int]:
    """Decode with mlx-vlm alone, and read the whole text again for every token."""
    answer: list[int] = []
    while len(answer) < count:
        tokens = mx.array([[*prompt.tokens, *answer]], dtype=mx.int32)
        media = {name: mx.array(array) for name, array in prompt.media.items()}
        embeddings = target.model.get_input_embeddings(tokens, **media).to_dict()
        embeddings = {name: value for name, value in embeddings.items() if value is not None}
        embeddings.pop("rope_deltas", None)
        if "position_ids" in embeddings:  # other families store them on the model
            embeddings["position_ids"] = mx.broadcast_to(
                embeddings["position_ids"], (3, 1, tokens.shape[1])
            )
        grid = {"image_grid_thw": media["image_grid_thw"]} if media else {}
        scores = target.language(tokens, **embeddings, **grid).logits
        answer.append(int(mx.argmax(scores[0, -1]).item()))
    return answer


def test_pictures_and_texts_are_read_at_their_positions_in_rows_and_batches(
    family: Any, target: Target, make_lane: Callable[..., Any], submit: Callable[..., Any]
) -> None:
    pixels = PIXELS.get(family, (PATCHES, 3 * 2 * 4 * 4))
    prompts: Sequence[PreparedPrompt] = (
        text(1, 9), picture(pixels, 3, 5, 7), text(5, 60), picture(pixels, 8, 40, 3), text(2, 30),
    )  # fmt: skip
    expected = [decode_without_cache(target, prompt, TOKENS) for prompt in prompts]
    plain = {"target": target, "head": None, "eos": frozenset[int](), "draft_tokens": 0}

    one_by_one = make_lane(chunk_tokens=16, **plain)
    for prompt, answer in zip(prompts, expected, strict=True):
        result = submit(one_by_one, prompt, max_tokens=TOKENS, draft_tokens=0)
        run_until_idle(one_by_one)
        assert result.row.answer == answer
    batched = make_lane(chunk_tokens=16, max_rows=1 if target.stores_positions else 8, **plain)
    rows = [submit(batched, prompt, max_tokens=TOKENS, draft_tokens=0) for prompt in prompts]
    run_until_idle(batched)
    assert [result.row.answer for result in rows] == expected


def test_only_a_family_without_positions_runs_one_row_at_a_time(family, target) -> None:
    assert target.stores_positions == (family is ernie4_5_moe_vl)
