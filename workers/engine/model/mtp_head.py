"""MTP heads: their forward pass, and how one is bound to its model.

A multi-token-prediction head mixes the embedding of token i + 1 with the hidden state of token i,
runs one more layer of its model's own kind, and shares the embeddings and the output layer of the
model (DeepSeek-V3, arXiv 2412.19437, 2.2). All families compute the same, as SGLang does
(`qwen3_next_mtp.py`, `glm4_moe_nextn.py`, `deepseek_nextn.py`): the head reads hidden states after
the model's last norm, and its own after its last norm when it drafts on. `head_formats.py` loads
their modules; a self-test decides whether a head is any good (`self_test.py`).

The modules are mlx-vlm's, duck-typed here; `tests/model/test_mtp_heads.py` compares with a pass in
NumPy.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import create_attention_mask

from paceline.terminal import printable
from workers.engine.model.device import cast_for_device
from workers.engine.model.draft_shortlist import DraftShortlist
from workers.engine.model.families import gemma4
from workers.engine.model.head_formats import NO_HEAD, Assistant, LayerHead, NoTensors
from workers.engine.model.known_heads import text_config
from workers.engine.model.kv_cache import KVCache, LayerCache, RowCache
from workers.engine.model.model_folder import check_folder
from workers.engine.model.target import Target

logger = logging.getLogger(__name__)

_NO_ASSISTANT = "the head of this family is an assistant, a repository of its own that --mtp names"
_HALF = (mx.float16, mx.bfloat16)


class HeadUnusable(Exception):
    """The head that the owner names is of another model; the message is a sentence."""


class MtpHead:
    """A head that is bound to its model."""

    has_caches = True
    """Whether it has keys and values; an assistant reads those of the model."""

    def __init__(self, drafter: Any, target: Target) -> None:
        self.drafter = drafter
        """Its modules, without those that it shares with the model."""
        self._embed = target.language.model.embed_tokens
        self._score = target.scores
        self._takes_positions = target.explicit_positions
        self.shortlist: DraftShortlist | None = None
        """Frequent tokens, if a draft over these pays."""

    def parameters(self) -> Any:
        """Return the head's own weights; it shares the target's embeddings and output layer."""
        return self.drafter.parameters()

    def new_caches(self) -> list[KVCache]:
        """Create the empty caches of one row, one for each layer."""
        return [KVCache() for _ in self.drafter.layers]

    def forward(
        self,
        tokens: mx.array,
        hidden: mx.array,
        caches: Sequence[LayerCache],
        positions: mx.array,
    ) -> mx.array:
        """Read token i + 1 with the hidden state of token i; return the head's hidden states.

        Shapes: tokens and positions [rows, L], hidden [rows, L, width]. A family that finds
        positions in its caches ignores `positions`, which are the slots.
        """
        head = self.drafter
        mixed = mx.concatenate(
            [head.pre_fc_norm_embedding(self._embed(tokens)), head.pre_fc_norm_hidden(hidden)],
            axis=-1,
        )
        state = head.fc(mixed)
        more = {"position_ids": positions} if self._takes_positions else {}
        # The attention of MLA families adds to scores, so that its mask must be an array.
        mask = create_attention_mask(state, caches[0], return_array=not self._takes_positions)
        for layer, cache in zip(head.layers, caches, strict=True):
            state = layer(state, mask=mask, cache=cache, **more)
        return head.norm(state)

    def draft(self, hidden: mx.array, further: mx.array) -> mx.array:
        """Return the most likely next token [rows] of hidden states [rows, 1, width].

        It is one of the shortlist and of `further` [rows, n], unless these are none.
        """
        if self.shortlist is not None and further.shape[1]:
            return self.shortlist.draft(hidden, further)
        return mx.argmax(self._score(hidden)[:, 0], axis=-1).astype(mx.int32)


class AssistantHead(MtpHead):
    """An assistant of Gemma 4: a small model that attends to the keys and values of its model.

    It keeps no caches and reads nothing between two drafts. It mixes the embedding of the last
    token with the model's hidden state of the token before, then with its own hidden states,
    all at the position of that token, as `SinglePositionMultiTokenCandidateGenerator` of
    Transformers does.
    """

    has_caches = False

    def __init__(self, drafter: Any, target: Target) -> None:
        super().__init__(drafter, target)
        model = target.language.model
        self._embed_scale = model.embed_scale
        layers = gemma4.last_layers(target.language)
        kinds = sorted({layer.layer_type for layer in drafter.model.layers})
        if not layers.keys() >= set(kinds):
            raise ValueError("the model has no layers of the kinds that the assistant attends to")
        self.attended_layers = tuple(layers[kind] for kind in kinds)
        """The layers of the model whose keys and values it reads."""
        self._kinds = kinds

    def new_caches(self) -> list[KVCache]:
        """Return none."""
        return []

    def draft_tokens(
        self, hidden: mx.array, last_tokens: mx.array, attended: Sequence[RowCache], length: int
    ) -> list[mx.array]:
        """Return the next `length` tokens, [rows] each.

        `hidden` [rows, 1, width] is the model's of the token before `last_tokens` [rows], and
        `attended` are the model's caches of the `attended_layers`.
        """
        assistant = self.drafter
        positions = attended[0].offset - 1
        masks, keys_values = {}, {}
        for kind, cache in zip(self._kinds, attended, strict=True):
            cache.offset = positions  # that of the last key: all keys up to it are visible
            window = assistant.config.text_config.sliding_window if kind == gemma4.SLIDING else None
            masks[kind] = cache.make_mask(1, window_size=window)
            keys_values[kind] = cache.state
        drafts: list[mx.array] = []
        token = last_tokens
        while len(drafts) < length:
            embedded = self._embed(token[:, None]) * self._embed_scale
            state = assistant.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
            for layer in assistant.model.layers:
                kind = layer.layer_type
                state, _, _ = layer(
                    state, masks[kind], None, shared_kv=keys_values[kind], offset=positions
                )
            state = assistant.model.norm(state)
            hidden = assistant.post_projection(state)
            token = self._choose(state)
            drafts.append(token)
        return drafts

    def _choose(self, hidden: mx.array) -> mx.array:
        """Return the most likely token [rows] of the assistant's own states [rows, 1, width]."""
        assistant, states = self.drafter, hidden[:, 0]
        clusters = assistant.masked_embedding
        if clusters is None:
            project = getattr(assistant, "lm_head", assistant.model.embed_tokens.as_linear)
            return mx.argmax(project(states), axis=-1).astype(mx.int32)
        # A large vocabulary is in clusters; only the tokens of the likeliest ones have scores.
        best = mx.argpartition(-clusters.centroids(states), kth=clusters.top_k - 1, axis=-1)
        ordering = clusters.token_ordering.reshape(clusters.num_centroids, -1)
        tokens = ordering[best[:, : clusters.top_k]].reshape(states.shape[0], -1)
        scores = (assistant.model.embed_tokens(tokens) @ states[:, :, None])[..., 0]
        at = mx.argmax(scores, axis=-1, keepdims=True)
        return mx.take_along_axis(tokens, at, axis=-1)[:, 0].astype(mx.int32)


def load_own_head(
    path: Path, config: dict[str, Any], target: Target
) -> tuple[MtpHead | None, str | None]:
    """Load the head in the directory of the model, or return the reason why it is missing."""
    head = target.family.head
    if head is None or isinstance(head, Assistant):
        return None, NO_HEAD if head is None else _NO_ASSISTANT
    try:
        return _bind(head.load(path, config, target.language), target), None
    except (ValueError, KeyError, FileNotFoundError) as error:
        names = f"{head.tensors(config)}*"
        if isinstance(head, LayerHead) and not isinstance(error, NoTensors):
            logger.warning("mtp_head.damaged reason=%s", printable(str(error)[:300]))
            return None, f"the {names} tensors of the checkpoint are not those of an MTP head"
        return None, f"the checkpoint has no {names} tensors (many conversions drop them)"


def load_separate_head(path: Path, target: Target) -> MtpHead:
    """Load the head in a directory that the owner names; raise `HeadUnusable` if it cannot draft.

    The directory has only a head, or a whole checkpoint with one.
    """
    head = target.family.head
    if head is None:
        raise HeadUnusable(f"The MTP head in {path} cannot draft: {NO_HEAD}.")
    if not (path / "config.json").is_file():
        raise HeadUnusable(
            f"The folder {path} holds no MTP head: it needs config.json and safetensors files."
        )
    try:
        config = check_folder(path, head=not isinstance(head, Assistant))
        _check_sizes(path, config, target)
        drafter = head.load(path, config, target.language)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = " ".join(printable(f"{type(error).__name__}: {str(error)[:300]}").split())
        raise HeadUnusable(f"The MTP head in {path} cannot be loaded ({reason}).") from error
    return _bind(drafter, target)


def _bind(drafter: Any, target: Target) -> MtpHead:
    """Give the head the type of the target: a mixture would be computed in single precision."""
    cast_for_device(drafter)
    dtype = target.language.model.norm.weight.dtype
    if dtype in _HALF:
        drafter.set_dtype(dtype, lambda kind: kind in _HALF)
    mx.eval(drafter.parameters())
    kind = AssistantHead if isinstance(target.family.head, Assistant) else MtpHead
    return kind(drafter, target)


def _check_sizes(path: Path, config: Mapping[str, Any], target: Target) -> None:
    """Raise `HeadUnusable` for a head of another width or vocabulary than the target."""
    theirs = dict(text_config(config))
    if isinstance(target.family.head, Assistant):
        theirs["hidden_size"] = config.get("backbone_hidden_size")
    for name, noun in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        ours = target.configured(name)
        if theirs.get(name) != ours:
            raise HeadUnusable(
                f"The MTP head in {path} is of another model: its {noun} is {theirs.get(name)}, "
                f"and that of the model {ours}."
            )
