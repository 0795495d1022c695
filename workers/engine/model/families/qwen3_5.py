"""Qwen3.5: positions are explicit, and mlx-vlm's own drafter reads hidden states."""

from __future__ import annotations

from workers.engine.model.families.family import Family
from workers.engine.model.head_formats import MtpBlock

_FAMILY = Family(
    score=lambda language, hidden: language.speculative_logits_from_hidden(hidden),
    takes_positions=True,
    explicit_positions=True,
    compiles=True,
    head=MtpBlock(),
)
FAMILIES = ((("qwen3_5",), _FAMILY),)
