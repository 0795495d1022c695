"""MTP heads: their forward pass, and how each family stores one.

A multi-token-prediction head mixes the embedding of token i + 1 with the hidden state of token i,
runs one more layer of its model's own kind, and shares the embeddings and the output layer of the
model (DeepSeek-V3, arXiv 2412.19437, 2.2). All families compute the same, as SGLang does
(`qwen3_next_mtp.py`, `glm4_moe_nextn.py`, `deepseek_nextn.py`): the head reads hidden states after
the model's last norm, and its own after its last norm when it drafts on. Their tensors have other
names: `layer_heads.py` lists the families whose head is a layer of their own. Some of them store
copies of what is shared, which are not loaded; a self-test decides whether a head is any good
(`self_test.py`).

The modules are mlx-vlm's, duck-typed here; `tests/model/test_mtp_heads.py` compares with a pass in
NumPy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_vlm.models.base import create_attention_mask
from mlx_vlm.models.qwen3_5.language import LanguageModel as Qwen35Language
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.drafters.qwen3_5_mtp import Qwen3_5MTPDraftModel
from mlx_vlm.speculative.drafters.qwen3_5_mtp.split import Qwen3_5MTPSplitter
from safetensors import safe_open

from paceline.terminal import printable
from workers.engine.model.device import cast_for_device
from workers.engine.model.draft_shortlist import DraftShortlist
from workers.engine.model.families import gemma4
from workers.engine.model.kv_cache import KVCache, LayerCache, RowCache
from workers.engine.model.layer_heads import ASSISTED, LAYER_HEADS, LayerHead
from workers.engine.model.model_folder import check_folder
from workers.engine.model.target import Target

logger = logging.getLogger(__name__)

_NO_HEAD = "the text-mtp lane supports no MTP head of this model family"
_HALF = (mx.float16, mx.bfloat16)
_ONLY_LAYER = "layers.0."
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


class HeadUnusable(Exception):
    """The head that the owner names is of another model; the message is a sentence."""


class _NoTensors(ValueError):
    """A folder has no tensors of a head."""


class MtpHead:
    """A head that is bound to its model."""

    has_caches = True
    """Whether it has keys and values of its own; an assistant reads those of the model."""

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

    def draft(self, hidden: mx.array) -> mx.array:
        """Return the most likely next token [rows] of hidden states [rows, 1, width]."""
        return mx.argmax(self._score(hidden)[:, 0], axis=-1).astype(mx.int32)

    def draft_frequent(self, hidden: mx.array, further: mx.array) -> mx.array:
        """Return the most likely token [rows] of the shortlist and of `further` [rows, n]."""
        assert self.shortlist is not None
        return self.shortlist.draft(hidden, further)


class AssistantHead(MtpHead):
    """An assistant of Gemma 4: a small model that attends to the keys and values of its model.

    It has none of its own and reads nothing between two drafts. It mixes the embedding of the last
    token with the model's hidden state of the token before, and goes on with its own hidden states,
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
        assistant, masks = self.drafter, {}
        positions = attended[0].offset - 1
        for cache in attended:
            cache.offset = positions  # that of the last key: all keys up to it are visible
        for kind, cache in zip(self._kinds, attended, strict=True):
            window = assistant.config.text_config.sliding_window if kind == gemma4.SLIDING else None
            masks[kind] = cache.make_mask(1, window_size=window)
        keys_values = {kind: cache.state for kind, cache in zip(self._kinds, attended, strict=True)}
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
            token = self.draft(state)
            drafts.append(token)
        return drafts

    def draft(self, hidden: mx.array) -> mx.array:
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


_NO_ASSISTANT = "the head of this family is an assistant, a repository of its own that --mtp names"


class _LayerHeadModule(nn.Module):  # type: ignore[misc]  # MLX has no types
    def __init__(self, width: int, epsilon: float, layer: nn.Module) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(width, epsilon)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, epsilon)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(width, epsilon)


class _NestedMtpSplitter(Qwen3_5MTPSplitter):  # type: ignore[misc]  # it has no types
    """Finds the tensors of a head also under `language_model.`, where vllm-mlx writes them."""

    def select_keys(self, key: str, text_config: dict[str, Any]) -> bool:  # noqa: ARG002
        return key.removeprefix("language_model.").startswith("mtp.")

    def rename(
        self,
        tensors: dict[str, mx.array],
        text_config: dict[str, Any],  # noqa: ARG002
    ) -> dict[str, mx.array]:
        return {key.removeprefix("language_model."): array for key, array in tensors.items()}


def load_own_head(
    path: Path, config: dict[str, Any], target: Target
) -> tuple[MtpHead | None, str | None]:
    """Load the head in the directory of the model; return why there is none otherwise."""
    if isinstance(target.language, ASSISTED):
        return None, _NO_ASSISTANT
    if not _has_heads(target):
        return None, _NO_HEAD
    try:
        drafter = _load_drafter(path, config, target)
    except (ValueError, KeyError, FileNotFoundError) as error:
        names = head_tensors(target, config)
        if not isinstance(error, _NoTensors) and type(target.language) in LAYER_HEADS:
            logger.warning("mtp_head.damaged reason=%s", printable(str(error)[:300]))
            return None, f"the {names} tensors of the checkpoint are not those of an MTP head"
        return None, f"the checkpoint has no {names} tensors (many conversions drop them)"
    return _bind(drafter, target), None


def load_separate_head(path: Path, target: Target) -> MtpHead:
    """Load the head in a directory that the owner names; raise `HeadUnusable` if it cannot draft.

    The directory has a head alone, or a whole checkpoint with one.
    """
    if not _has_heads(target):
        raise HeadUnusable(f"The MTP head in {path} cannot draft: {_NO_HEAD}.")
    if not (path / "config.json").is_file():
        raise HeadUnusable(
            f"The folder {path} holds no MTP head: it needs config.json and safetensors files."
        )
    try:
        config = check_folder(path, head=not isinstance(target.language, ASSISTED))
        _check_sizes(path, config, target)
        drafter = _load_drafter(path, config, target)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = " ".join(printable(f"{type(error).__name__}: {str(error)[:300]}").split())
        raise HeadUnusable(f"The MTP head in {path} cannot be loaded ({reason}).") from error
    return _bind(drafter, target)


def head_tensors(target: Target, config: Mapping[str, Any]) -> str:
    """Return what the names of the tensors of a head begin with, for a sentence."""
    head = LAYER_HEADS.get(type(target.language))
    return f"{_prefix(head, config)}*" if head else "mtp.*"


def _has_heads(target: Target) -> bool:
    language = target.language
    return isinstance(language, (Qwen35Language, *LAYER_HEADS, *ASSISTED))


def _load_drafter(path: Path, config: dict[str, Any], target: Target) -> Any:
    if isinstance(target.language, ASSISTED):
        if config.get("model_type") not in _ASSISTANTS:
            raise ValueError("it is no assistant of Gemma 4")
        return load_drafter(str(path), kind="mtp")[0]
    head = LAYER_HEADS.get(type(target.language))
    if head is not None:
        return _load_layer(path, config, type(target.language), type(target.language.args), head)
    if config.get("model_type") != Qwen3_5MTPSplitter.output_model_type:
        return _NestedMtpSplitter().load(path, source_config=config)
    drafter, _ = load_drafter(str(path), kind="mtp")
    if not isinstance(drafter, Qwen3_5MTPDraftModel):
        raise ValueError(_NO_HEAD)
    return drafter


def _load_layer(
    path: Path, config: Mapping[str, Any], language: type, arguments: Any, head: LayerHead
) -> nn.Module:
    """Load the layer of a head, renamed as the only layer of a model of its family."""
    tensors = _read_tensors(path, config, head)
    if not tensors:
        raise _NoTensors("it has no tensors of a head")
    args = arguments.from_dict(_text(config))
    model = language(replace(args, **head.options))
    published = any(".mlp.experts.0." in name for name in tensors)
    tensors = model.sanitize(tensors)
    if head.norms_less_one and published:
        for part in head.parts.values():
            name = f"{part}.weight"
            if name in tensors and tensors[name].ndim == 1:
                tensors[name] = tensors[name] + 1.0
    tensors = {name.removeprefix("model."): array for name, array in tensors.items()}
    module = _LayerHeadModule(args.hidden_size, args.rms_norm_eps, model.model.layers[0])
    _quantise(module, tensors, config)
    module.load_weights(list(tensors.items()))
    return module


def _read_tensors(path: Path, config: Mapping[str, Any], head: LayerHead) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            named = {key: _place(key, config, head) for key in opened.keys()}  # noqa: SIM118
        if any(named.values()):
            arrays = mx.load(str(file))  # reads what is used alone
            tensors |= {name: arrays[key] for key, name in named.items() if name}
    return tensors


def _place(key: str, config: Mapping[str, Any], head: LayerHead) -> str | None:
    """Return the name of a tensor in a model of one layer; None if it is no part of the head."""
    key = key.removeprefix("language_model.")
    stripped = head.apart.get(str(config.get("model_type")))
    if stripped is not None:
        for prefix in stripped:
            key = key.removeprefix(prefix)
    elif key.startswith(prefix := _prefix(head, config)):
        key = key.removeprefix(prefix)
    else:
        return None
    module, _, name = key.rpartition(".")
    if module in head.shared or name == "inv_freq":
        return None
    if module in head.parts:
        return f"{head.parts[module]}.{name}"
    return f"model.{_ONLY_LAYER}{key.removeprefix(_ONLY_LAYER)}"


def _prefix(head: LayerHead, config: Mapping[str, Any]) -> str:
    return head.prefix.format(layers=_text(config).get("num_hidden_layers"))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and nested else config


def _quantise(
    module: nn.Module, tensors: Mapping[str, mx.array], config: Mapping[str, Any]
) -> None:
    """Quantise the modules whose tensors are, by the sizes of these."""
    mode = (config.get("quantization") or {}).get("mode", "affine")

    def options(name: str, child: Any) -> bool | dict[str, Any]:
        scales = tensors.get(f"{name}.scales")
        if scales is None or not hasattr(child, "to_quantized"):
            return False
        width = child.weight.shape[-1]
        bits = tensors[f"{name}.weight"].shape[-1] * 32 // width
        return {"group_size": width // scales.shape[-1], "bits": bits, "mode": mode}

    nn.quantize(module, class_predicate=options)


def _bind(drafter: Any, target: Target) -> MtpHead:
    """Give the head the type of the target: a mixture would be computed in single precision."""
    cast_for_device(drafter)
    dtype = target.language.model.norm.weight.dtype
    if dtype in _HALF:
        drafter.set_dtype(dtype, lambda kind: kind in _HALF)
    mx.eval(drafter.parameters())
    kind = AssistantHead if isinstance(target.language, ASSISTED) else MtpHead
    return kind(drafter, target)


def _check_sizes(path: Path, config: Mapping[str, Any], target: Target) -> None:
    """Raise `HeadUnusable` for a head of another width or vocabulary than the target."""
    theirs = dict(_text(config))
    if isinstance(target.language, ASSISTED):
        theirs["hidden_size"] = config.get("backbone_hidden_size")
    arguments = getattr(target.language, "args", None) or target.language.config
    for name, noun in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        ours = getattr(arguments, name)
        if theirs.get(name) != ours:
            raise HeadUnusable(
                f"The MTP head in {path} is of another model: its {noun} is {theirs.get(name)}, "
                f"and that of the model {ours}."
            )
