"""How families store their MTP heads: as one more layer of their own, or as an assistant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_vlm.models.deepseek_v3.language import LanguageModel as DeepseekV3Language
from mlx_vlm.models.gemma4.language import LanguageModel as Gemma4Language
from mlx_vlm.models.gemma4_text.language import LanguageModel as Gemma4TextLanguage
from mlx_vlm.models.glm4_moe.language import LanguageModel as Glm4MoeLanguage
from mlx_vlm.models.glm4_moe_lite.language import LanguageModel as Glm4MoeLiteLanguage
from mlx_vlm.models.qwen3_next.language import LanguageModel as Qwen3NextLanguage

from workers.engine.model.known_heads import MTP_PREFIX, NEXTN_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHead:
    """How a family stores a head that is one more of its own layers."""

    prefix: str
    """What the tensors of the head begin with in a whole checkpoint of so many `layers`."""
    apart: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What they begin with in the folder of a head alone, by its model type."""
    parts: Mapping[str, str]
    """The names of norms and projection, as `_LayerHeadModule` has them."""
    shared: Sequence[str] = ()
    """Copies of what the head shares with its model."""
    options: Mapping[str, Any]
    """What makes a model of the family consist of the layer of the head."""
    norms_less_one: bool = False
    """Whether the publisher stores the weights of norms less one, as the conversions do not."""


_NEXTN = LayerHead(
    prefix=NEXTN_PREFIX,
    # mlx_vlm.speculative.drafters.glm4_moe_lite_mtp.split writes such folders.
    apart={"glm4_moe_lite_mtp": ("model.", "mtp_block.")},
    parts={
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
        "shared_head_norm": "norm",
    },
    shared=("embed_tokens", "lm_head", "shared_head.head"),
    options={"num_hidden_layers": 1, "first_k_dense_replace": 0},
)
LAYER_HEADS: Mapping[type, LayerHead] = {
    Qwen3NextLanguage: LayerHead(
        prefix=MTP_PREFIX,
        # mlx_vlm.speculative.drafters.qwen3_5_mtp.split writes such folders.
        apart={"qwen3_5_mtp": ()},
        parts={
            name: name for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        },
        options={
            "num_hidden_layers": 1,
            "full_attention_interval": 1,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        },
        norms_less_one=True,
    ),
    Glm4MoeLiteLanguage: _NEXTN,
    Glm4MoeLanguage: _NEXTN,
    DeepseekV3Language: _NEXTN,
}
"""By the class of the language model."""
ASSISTED = (Gemma4Language, Gemma4TextLanguage)
"""Language models whose heads are assistants."""
