"""Interface to mlx-vlm's language models: their passes, caches and picture features.

It imports public classes and functions only. How a Qwen3.5 language model takes positions and
returns hidden states is duck-typed here and nowhere else (and for MTP heads in `mtp_head.py`);
`tests/model/test_mlx_vlm_contract.py` fails when that changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.models.gemma4.language import LanguageModel as Gemma4Language
from mlx_vlm.models.glm4v.language import LanguageModel as Glm4vLanguage
from mlx_vlm.models.glm4v_moe.language import LanguageModel as Glm4vMoeLanguage
from mlx_vlm.models.glm_ocr.language import LanguageModel as GlmOcrLanguage
from mlx_vlm.models.lfm2.language import LanguageModel as Lfm2Language
from mlx_vlm.models.llama4.language import LanguageModel as Llama4Language
from mlx_vlm.models.paddleocr_vl.language import LanguageModel as PaddleOcrLanguage
from mlx_vlm.models.qwen2_5_vl.language import LanguageModel as Qwen25VlLanguage
from mlx_vlm.models.qwen2_vl.language import LanguageModel as Qwen2VlLanguage
from mlx_vlm.models.qwen3_5.language import LanguageModel as Qwen35Language
from mlx_vlm.models.qwen3_next.language import LanguageModel as Qwen3NextLanguage
from mlx_vlm.models.qwen3_vl.language import LanguageModel as Qwen3VlLanguage
from mlx_vlm.models.qwen3_vl_moe.language import LanguageModel as Qwen3VlMoeLanguage

from paceline.protocol import whole_scope
from workers.engine.model.families import gemma4, lfm2, llama4, qwen3_next
from workers.engine.model.kv_cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    LayerCache,
    RecurrentCache,
    RotatingKVCache,
    RowCache,
)
from workers.engine.model.layer_heads import ASSISTED, LAYER_HEADS

# Families that return the positions of a prompt with pictures along with its embeddings,
_ReturnsPositions = Qwen2VlLanguage | Qwen25VlLanguage | Qwen3VlLanguage | Qwen3VlMoeLanguage
# and families that store them in the language model.
_StoresPositions = Glm4vLanguage | Glm4vMoeLanguage | GlmOcrLanguage | PaddleOcrLanguage
# Families whose attention cuts a mask to the length of one row.
_CutsMasks = Qwen3VlMoeLanguage
_FEATURES_BYTES = 256 << 20
_NO_CODE = (lambda: None).__code__
_POSITION_ATTRIBUTES = ("_position_ids", "_rope_deltas")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbedding:
    """Embeddings of a prompt with pictures, which replace its token ids in the prefill."""

    embeddings: mx.array
    """[1, tokens, width]."""
    positions: mx.array | None
    """[3, 1, tokens] for models with multimodal rotary positions."""
    position_offset: int
    """Difference from a slot number to a text position after the pictures."""
    extras: dict[str, mx.array]
    """Further arguments of the family's language model."""


class CompiledPasses(NamedTuple):
    """Which passes of a batch are compiled."""

    plain: bool
    """Those of one token."""
    verify: bool
    """Those of several tokens."""


class PictureFeatures:
    """Output of the vision tower by isolation scope and pictures, least recently used dropped.

    mlx-vlm's models call `get` and `put` of a cache that they are given.
    """

    def __init__(self, limit_bytes: int = _FEATURES_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._features: OrderedDict[tuple[str, bytes], mx.array] = OrderedDict()
        self.size_bytes = 0
        """Memory in use."""

    def get(self, key: tuple[str, bytes]) -> mx.array | None:
        """Return the features of pictures, if there are any."""
        features = self._features.get(key)
        if features is not None:
            self._features.move_to_end(key)
        return features

    def put(self, key: tuple[str, bytes], features: mx.array) -> None:
        """Store the features of pictures."""
        if features.nbytes > self._limit_bytes or key in self._features:
            return
        self._features[key] = features
        self.size_bytes += features.nbytes
        while self.size_bytes > self._limit_bytes:
            self.size_bytes -= self._features.popitem(last=False)[1].nbytes

    def drop(self, scope: str | None) -> None:
        """Drop the features of a scope; None: of all."""
        for key in [key for key in self._features if scope in (None, whole_scope(key[0]))]:
            self.size_bytes -= self._features.pop(key).nbytes


class Target:
    """The model that generates the answers; both lanes share its weights."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.language = getattr(model, "language_model", model)
        # Families take explicit positions, or find them in their caches.
        self.explicit_positions = isinstance(self.language, Qwen35Language)
        self.returns_hidden = self.explicit_positions or isinstance(
            self.language, (*LAYER_HEADS, *ASSISTED)
        )
        """Whether a pass returns hidden states, as an MTP head reads them, and not scores."""
        owned = self.explicit_positions or isinstance(self.language, tuple(LAYER_HEADS))
        self.compiles = CompiledPasses(plain=owned, verify=owned)
        """Which passes are compiled, as they read no value on the host; probed at load where others
        may be."""
        self.takes_positions = self.explicit_positions or isinstance(
            self.language, _ReturnsPositions | _StoresPositions
        )
        stored = any(hasattr(self.language, name) for name in _POSITION_ATTRIBUTES)
        self.stores_positions = stored and not self.takes_positions
        """Whether the model stores the positions of one row itself and takes none."""
        embed = getattr(model, "get_input_embeddings", None)
        self._stores_features = "vision_cache" in getattr(embed, "__code__", _NO_CODE).co_consts
        self.picture_features = PictureFeatures()
        """For the families that take one; a chat sends its pictures in every turn."""
        self.native_verify = True
        """Whether several tokens may be verified in one pass; probed at load."""
        caches = self.new_caches()
        known = all(map(_is_known, caches))
        self.supports_prefix_cache = known and not self.stores_positions
        """Whether the caches of a prefix can be stored."""
        self.is_recurrent = any(type(cache) is ArraysCache for cache in caches)
        """Whether a layer has a state that each token replaces."""
        self.starts_anywhere = all(type(cache) is KVCache for cache in caches)
        """Whether a row can start after any token of a stored prefix: a state and a sliding window
        are stored at the ends of messages alone."""
        self.supports_batching = known and not self.stores_positions
        """Whether rows of any length may share one forward pass; probed at load."""

    @property
    def attention_heads(self) -> int:
        """Return the number of heads of a layer; 0 if its configuration has none."""
        for holder in ("args", "config"):
            heads = getattr(getattr(self.language, holder, None), "num_attention_heads", 0)
            if type(heads) is int and heads > 0:
                return heads
        return 0

    def row_limit(self, max_rows: int) -> int:
        """Return how many of `max_rows` rows may run at once."""
        return 1 if self.stores_positions else max_rows

    def new_caches(self) -> list[LayerCache]:
        """Create the empty caches of one row, one for each layer."""
        if self.stores_positions:
            # Some families would read the next prompt with the positions of the last one, or raise.
            for name in _POSITION_ATTRIBUTES:
                if hasattr(self.language, name):
                    setattr(self.language, name, None)
        make = getattr(self.language, "make_cache", None)
        return make() if make else [KVCache() for _ in self.language.layers]

    def embed(
        self,
        token_ids: mx.array,
        media: dict[str, mx.array],
        key: tuple[str, bytes] | None = None,
    ) -> PromptEmbedding:
        """Run the vision tower and embed its output into the prompt.

        `key` names scope and pictures: features that are stored under it are not computed again.
        """
        arguments: dict[str, Any] = dict(media)
        if key is not None and self._stores_features:
            arguments |= {"vision_cache": self.picture_features, "_image_key": key}
        features = self.model.get_input_embeddings(token_ids, **arguments).to_dict()
        known = ("inputs_embeds", "position_ids", "rope_deltas", "attention_mask")
        positions, deltas = features.get("position_ids"), features.get("rope_deltas")
        if isinstance(self.language, _StoresPositions):
            positions, deltas = (getattr(self.language, name) for name in _POSITION_ATTRIBUTES)
        extras = {
            name: value
            for name, value in features.items()
            if value is not None and name not in known
        }
        if self.stores_positions:  # it computes positions from the sizes of the pictures
            extras |= {name: size for name, size in media.items() if name.endswith("_grid_thw")}
        return PromptEmbedding(
            embeddings=features["inputs_embeds"],
            positions=positions if self.takes_positions else None,
            position_offset=int(deltas.reshape(-1)[0].item()) if deltas is not None else 0,
            extras=extras,
        )

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[LayerCache | RecurrentCache],
        positions: mx.array,
        *,
        embeddings: mx.array | None = None,
        extras: dict[str, mx.array] | None = None,
    ) -> mx.array:
        """Run tokens [rows, L] at positions [rows, L] or [3, rows, L] and append to the caches.

        Returns the hidden states [rows, L, width] if `returns_hidden`, else the scores
        [rows, L, vocabulary]. Families that find positions in their caches ignore `positions`.
        """
        if isinstance(self.language, Qwen3NextLanguage):
            return qwen3_next.forward(self.language, tokens, caches)
        rows = [cache for cache in caches if isinstance(cache, RowCache)]
        own = self._forward_rows(tokens, caches, rows, embeddings) if rows else None
        if own is not None:
            return own
        if isinstance(self.language, Gemma4Language):
            return self.language.model(
                tokens, inputs_embeds=embeddings, cache=list(caches), **(extras or {})
            )
        if self.returns_hidden and not self.explicit_positions:
            return self.language.model(tokens, cache=list(caches))
        arguments: dict[str, Any] = dict(extras or {})
        if embeddings is not None:
            arguments["inputs_embeds"] = embeddings
        if self.takes_positions:
            if positions.ndim == 2:
                positions = mx.broadcast_to(positions[None], (3, *positions.shape))
            arguments["position_ids"] = positions
        if self.explicit_positions:
            arguments |= {"return_hidden": True, "skip_logits": True}
        layers: list[Any] = list(caches)
        if isinstance(self.language, _CutsMasks):
            layers = [_ByPositions(one) if isinstance(one, RowCache) else one for one in caches]
        output = self.language(tokens, cache=layers, **arguments)
        return output.hidden_states[-1] if self.explicit_positions else output.logits

    def _forward_rows(
        self,
        tokens: mx.array,
        caches: Sequence[LayerCache | RecurrentCache],
        rows: Sequence[RowCache],
        embeddings: mx.array | None,
    ) -> mx.array | None:
        """Run the pass of a batch where mlx-vlm's cannot serve one; return None for all others."""
        if isinstance(self.language, Gemma4Language):
            return gemma4.forward(self.language, tokens, rows)
        if isinstance(self.language, Llama4Language):
            return llama4.forward(self.language, tokens, rows, embeddings)
        if isinstance(self.language, Lfm2Language):
            return lfm2.forward(self.language, tokens, caches)
        return None

    def scores(self, output: mx.array, last: int | None = None) -> mx.array:
        """Return the scores [rows, L, vocabulary] of all positions of a pass, or of the last."""
        if last is not None:
            output = output[:, -last:]
        if not self.returns_hidden:
            return output
        if self.explicit_positions:
            return self.language.speculative_logits_from_hidden(output)
        if isinstance(self.language, ASSISTED):
            return gemma4.scores(self.language, output)
        if "lm_head" in self.language:
            return self.language.lm_head(output)
        return self.language.model.embed_tokens.as_linear(output)


class _ByPositions:
    """A row cache for a family that takes positions, and cuts masks to the length of one row."""

    def __init__(self, cache: RowCache) -> None:
        self.offset = cache.slots
        """Never less than the length of a row, so nothing is cut."""
        self.make_mask = cache.make_mask
        self.update_and_fetch = cache.update_and_fetch


def _is_known(cache: Any) -> bool:
    """Return whether the engine can store the state of a layer, and hold it for several rows."""
    if type(cache) is RotatingKVCache:
        return bool(cache.keep == 0)
    return type(cache) in (KVCache, ChunkedKVCache, ArraysCache)
