"""Loading a checkpoint: target, processor, MTP head, and the facts of its folder."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from mlx_vlm.utils import get_model_type, load
from pydantic import ValidationError
from transformers import AutoConfig

from paceline.protocol import SamplingDefaults
from workers.engine.model.adapter import apply_adapter
from workers.engine.model.device import cast_for_device
from workers.engine.model.model_folder import check_folder, forbid_code, positive
from workers.engine.model.mtp_head import MtpHead, load_own_head, load_separate_head
from workers.engine.model.target import Target
from workers.engine.types import ModelUnusable, WeightType

logger = logging.getLogger(__name__)

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_LAST_WITHOUT_BFLOAT16 = 14
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "tekken.json")
"""Patterns of the files of all tokenizers; the last is Mistral's only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts of a model in its folder, except the weights."""

    processor: Any
    eos: frozenset[int]
    vocabulary: int
    context_tokens: int
    default_max_tokens: int | None
    """The checkpoint's limit for answers whose request names none."""
    sampling: SamplingDefaults
    """The checkpoint's values for requests that have none."""
    family: str


Facts = TypeVar("Facts", bound=ModelFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(ModelFacts):
    """A loaded model."""

    target: Target
    head: MtpHead | None
    mtp_unavailable_reason: str | None
    """A phrase for the logs and the ready line; None if there is a head."""


def load_checkpoint(
    path: Path,
    *,
    mtp: Path | None = None,
    adapter: Path | None = None,
    dtype: WeightType | None = None,
) -> Checkpoint:
    """Load target, processor and, if there is one, the MTP head from a directory.

    `mtp` is the directory of a head in place of the model's own. Runs no code of any. Raises the
    errors of the libraries, `HeadUnusable` for a head of another model, and `ModelUnusable` for an
    adapter that does not fit the model.
    """
    config = check_folder(path)
    _check_type(config)
    if not any(next(path.glob(name), None) for name in _TOKENIZER_FILES):
        raise ValueError("the tokenizer is missing: no file of it is there")
    forbid_code()
    model, processor = load(str(path), trust_remote_code=False)
    architecture = str(mx.device_info().get("architecture", ""))
    chosen = choose_dtype(dtype, str(config.get("model_type", "")), architecture)
    if chosen is not None:
        model.set_dtype(getattr(mx, chosen), lambda kind: kind in (mx.float16, mx.bfloat16))
    cast_for_device(model)
    if adapter is not None:
        apply_adapter(model, adapter)
        cast_for_device(model)
    target = Target(model)
    if mtp is None:
        head, mtp_unavailable_reason = load_own_head(path, config, target)
    else:
        head, mtp_unavailable_reason = load_separate_head(mtp, target), None
    facts = read_facts(path, config, processor, target)
    return Checkpoint(
        target=target,
        head=head,
        mtp_unavailable_reason=mtp_unavailable_reason,
        **{field.name: getattr(facts, field.name) for field in fields(ModelFacts)},
    )


def read_facts(
    path: Path, config: dict[str, Any], processor: Any, target: Target | None = None
) -> ModelFacts:
    """Return the facts of a folder's model; a loaded `target` adds the rest."""
    file = path / "generation_config.json"
    generation = json.loads(file.read_text()) if file.is_file() else {}
    limit = generation.get("max_new_tokens")
    return ModelFacts(
        processor=processor,
        eos=_end_tokens(config, generation, processor),
        vocabulary=positive("vocab_size", _text_value(path, config, target, "vocab_size")),
        context_tokens=positive(
            "max_position_embeddings",
            _text_value(path, config, target, "max_position_embeddings") or 4096,
        ),
        default_max_tokens=positive("max_new_tokens", limit) if limit is not None else None,
        sampling=_sampling(generation),
        family=str(config.get("model_type", "unknown")),
    )


def limit_context(facts: Facts, tokens: int | None) -> Facts:
    """Limit the context of a model; raise `ModelUnusable` for more than it was trained for."""
    if tokens is None:
        return facts
    if tokens > facts.context_tokens:
        raise ModelUnusable(
            f"A context of {tokens} tokens is longer than the {facts.context_tokens} that "
            "the model was trained for; choose a smaller --context."
        )
    return replace(facts, context_tokens=tokens)


def _text_value(path: Path, config: dict[str, Any], target: Target | None, name: str) -> object:
    """Return a value of the language model's configuration, as published, or its default.

    Published configurations leave out what equals the default in Transformers, whose defaults are
    therefore meant; mlx-vlm has others (Gemma 3: a context of 4,096 instead of 131,072 tokens).
    """
    for key in TEXT_CONFIGS:
        nested = config.get(key)
        if isinstance(nested, dict) and nested:
            return _text_value(path, nested, target, name)
    if config.get(name) is not None:
        return config[name]
    try:
        text = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
        value: object = getattr(text, name, None)
    except Exception as error:  # noqa: BLE001  # a family may be unknown there, or raise anything
        logger.info("model.defaults_unknown error=%s", type(error).__name__)
        value = None
    return value or (target.configured(name) if target else None)


def _sampling(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Return the sampling values of a generation config, without those that cannot be one."""
    values = SamplingDefaults()
    for name in SamplingDefaults.model_fields:
        try:
            values = SamplingDefaults.model_validate(
                {**values.model_dump(), name: generation.get(name)}, strict=True
            )
        except ValidationError:
            logger.warning("model.sampling_ignored field=%s", name)
    return values


def _check_type(config: dict[str, Any]) -> None:
    """Raise ValueError for a type that mlx-vlm does not know; it would log its own search."""
    name = str(get_model_type(config))
    packages = ("mlx_vlm.models", "mlx_vlm.speculative.drafters")
    if "." in name or not any(find_spec(f"{package}.{name}") for package in packages):
        raise ValueError(f"mlx-vlm does not support the model type '{name}' of config.json")


def choose_dtype(dtype: WeightType | None, family: str, architecture: str) -> WeightType | None:
    """Return the type for the weights of a family on a device; None: as they are stored.

    Apple's generations 13 and 14 (M1 and M2) compute bfloat16 as float32. Gemma's activations
    exceed the range of float16.
    """
    if dtype is not WeightType.AUTO:
        return dtype
    generation = re.fullmatch(r"applegpu_g(\d+)\w*", architecture)
    old = generation is not None and int(generation[1]) <= _LAST_WITHOUT_BFLOAT16
    return WeightType.FLOAT16 if old and not family.startswith("gemma") else None


def _end_tokens(
    config: dict[str, Any], generation: dict[str, Any], processor: Any
) -> frozenset[int]:
    """Return every token that ends an answer, by configuration, generation config, tokenizer."""
    named = [
        one.get("eos_token_id") for one in (config, config.get("text_config") or {}, generation)
    ]
    named.append(getattr(getattr(processor, "tokenizer", processor), "eos_token_id", None))
    each = (value if isinstance(value, list) else [value] for value in named if value is not None)
    ends = {token for tokens in each for token in tokens}
    if not all(type(token) is int for token in ends):
        raise ValueError("eos_token_id is no list of tokens")
    return frozenset(ends)
