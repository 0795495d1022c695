"""DeepSeek V3 and GLM 4: an MTP head is one more of their layers, stored behind the others."""

from dataclasses import replace

from workers.engine.model.families.family import Family, score
from workers.engine.model.head_formats import LayerHead
from workers.engine.model.known_heads import NEXTN_PREFIX

_HEAD = LayerHead(
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
_FAMILY = Family(score=score, compiles=True, head=_HEAD)
FAMILIES = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _FAMILY),
    "xing4_0": replace(_FAMILY, head=None),  # extends DeepSeek's class by other layers
}
