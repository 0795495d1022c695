"""Families with multimodal rotary positions, which they return with a prompt's pictures or keep.

The attention of Qwen3-VL's mixtures cuts a mask to the length of one row, by the cache's offset.
The positions of Qwen3.5 are explicit, and mlx-vlm's own drafter reads its hidden states.
"""

from types import SimpleNamespace

from workers.engine.model.families.family import Family
from workers.engine.model.head_formats import MtpBlock
from workers.engine.model.kv_cache import RowCache


def _uncut(cache: RowCache) -> SimpleNamespace:
    """Return a cache with an offset that is never less than the length of a row."""
    return SimpleNamespace(
        offset=cache.slots, make_mask=cache.make_mask, update_and_fetch=cache.update_and_fetch
    )


_KEEPS = Family(takes_positions=True, keeps_positions=True)
FAMILIES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), Family(takes_positions=True)),
    "qwen3_vl_moe": Family(takes_positions=True, adapt=_uncut),
    **dict.fromkeys(("glm4v_moe", "glm_ocr", "paddleocr_vl", "glm4v"), _KEEPS),
    "qwen3_5": Family(
        score=lambda language, hidden: language.speculative_logits_from_hidden(hidden),
        takes_positions=True,
        explicit_positions=True,
        compiles=True,
        head=MtpBlock(),
    ),
}
