"""Interface to mlx-vlm's language models: their passes, caches and picture features.

Differences of a family are in its record (`families`), duck-typed there;
`tests/model/test_mlx_vlm_contract.py` fails when mlx-vlm's models change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from paceline.protocol import whole_scope
from workers.engine.model.families import family_of
from workers.engine.model.kv_cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    LayerCache,
    RecurrentCache,
    RotatingKVCache,
    RowCache,
)

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

    def __init__(self) -> None:
        self._features: dict[tuple[str, bytes], mx.array] = {}

    @property
    def size_bytes(self) -> int:
        """Return the memory in use."""
        return sum(features.nbytes for features in self._features.values())

    def get(self, key: tuple[str, bytes]) -> mx.array | None:
        """Return the features of pictures, if there are any."""
        features = self._features.pop(key, None)
        if features is not None:
            self._features[key] = features
        return features

    def put(self, key: tuple[str, bytes], features: mx.array) -> None:
        """Store the features of pictures."""
        if features.nbytes > _FEATURES_BYTES:
            return
        self._features.setdefault(key, features)
        while self.size_bytes > _FEATURES_BYTES:
            del self._features[next(iter(self._features))]

    def drop(self, scope: str | None) -> None:
        """Drop the features of a scope; None: of all."""
        for key in [key for key in self._features if scope in (None, whole_scope(key[0]))]:
            del self._features[key]


class Target:
    """The model that generates the answers; both lanes share its weights."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.language = getattr(model, "language_model", model)
        self.family = family_of(self.language)
        self.explicit_positions = self.family.explicit_positions
        self.returns_hidden = self.family.score is not None
        """Whether a pass returns hidden states, as an MTP head reads them, and not scores."""
        self.compiles = CompiledPasses(plain=self.family.compiles, verify=self.family.compiles)
        """Which passes are compiled, as they read no value on the host; probed at load where others
        may be."""
        stored = any(hasattr(self.language, name) for name in _POSITION_ATTRIBUTES)
        self.stores_positions = stored and not self.family.takes_positions
        """Whether the model stores the positions of one row itself, so that only one runs at once,
        and takes none."""
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
        are stored only at the ends of messages."""
        self.supports_batching = known and not self.stores_positions
        """Whether rows of any length may share one forward pass; probed at load."""

    def configured(self, name: str) -> Any:
        """Return a value of the language model's configuration, if mlx-vlm has read any."""
        holders = (getattr(self.language, name, None) for name in ("args", "config"))
        return next(filter(None, (getattr(holder, name, None) for holder in holders)), None)

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
        if self.family.keeps_positions:
            positions, deltas = (getattr(self.language, name) for name in _POSITION_ATTRIBUTES)
        features = {name: value for name, value in features.items() if value is not None}
        extras = {name: value for name, value in features.items() if name not in known}
        if self.stores_positions:  # it computes positions from the sizes of the pictures
            extras |= {name: size for name, size in media.items() if name.endswith("_grid_thw")}
        return PromptEmbedding(
            embeddings=features["inputs_embeds"],
            positions=positions if self.family.takes_positions else None,
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
        family, language = self.family, self.language
        batched = any(isinstance(cache, RowCache) for cache in caches)
        if family.own_pass is not None and (batched or family.own_prefill):
            return family.own_pass(language, tokens, caches)
        arguments: dict[str, Any] = dict(extras or {})
        if embeddings is not None:
            arguments["inputs_embeds"] = embeddings
        if family.takes_positions:
            if positions.ndim == 2:
                positions = mx.broadcast_to(positions[None], (3, *positions.shape))
            arguments["position_ids"] = positions
        layers: list[Any] = list(caches)
        if family.adapt is not None:
            layers = [family.adapt(one) if isinstance(one, RowCache) else one for one in caches]
        if family.explicit_positions:
            arguments |= {"return_hidden": True, "skip_logits": True}
            return language(tokens, cache=layers, **arguments).hidden_states[-1]
        if self.returns_hidden:
            return language.model(tokens, cache=layers, **arguments)
        return language(tokens, cache=layers, **arguments).logits

    def scores(self, output: mx.array, last: int | None = None) -> mx.array:
        """Return the scores [rows, L, vocabulary] of all positions of a pass, or of the last."""
        if last is not None:
            output = output[:, -last:]
        score = self.family.score
        return output if score is None else score(self.language, output)


def _is_known(cache: Any) -> bool:
    """Return whether the engine can store the state of a layer, and hold it for several rows."""
    if type(cache) is RotatingKVCache:
        return bool(cache.keep == 0)
    return type(cache) in (KVCache, ChunkedKVCache, ArraysCache)
