"""Limits of a group, checked before it loads hundreds of gigabytes: splits, memory, requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.request.constraint import Constraint
from workers.engine.model.checkpoint import TEXT_CONFIGS
from workers.engine.types import Generation, InvalidGeneration, ModelUnusable
from workers.group.hosts import Hosts
from workers.group.rank import RankFacts
from workers.group.ranks import RankRefused
from workers.settings import Split

_MARGIN = 1.1
"""Memory that a rank needs, to that of its weights: caches and activations come on top."""
_MAX_TOP_LOGPROBS = 11


def choose_split(folder: Path, config: dict[str, Any], ranks: int, split: Split | None) -> Split:
    """Return how the ranks divide the model; raise `ModelUnusable` if they cannot.

    Without a wish these are tensors where they divide, else layers.
    """
    from mlx_lm.utils import load_model  # noqa: PLC0415 - loads lazily, so no weights are read

    model, _ = load_model(folder, lazy=True, strict=False)
    problems = {
        Split.TENSOR: _tensor_problem(model, config, ranks),
        Split.PIPELINE: _pipeline_problem(model, folder, ranks),
    }
    wanted = [split] if split else list(Split)
    possible = [one for one in wanted if not problems[one]]
    if not possible:
        raise ModelUnusable(
            f"The model cannot be split over {ranks} ranks: "
            + "; ".join(f"by {one}, {problems[one]}" for one in wanted)
            + "."
        )
    return possible[0]


def _tensor_problem(model: Any, config: dict[str, Any], ranks: int) -> str:
    """Return why the ranks cannot have a part of each layer; empty if they can."""
    if not hasattr(model, "shard"):
        return "mlx-lm cannot shard this family"
    parts = [config, *(config.get(name) for name in TEXT_CONFIGS)]
    heads = {
        name: count
        for part in parts
        if isinstance(part, dict)
        for name, count in part.items()
        if name.endswith("_heads") and "num" in name and type(count) is int
    }
    uneven = next((name for name, count in heads.items() if count % ranks), None)
    return f"its {heads[uneven]} {uneven} do not divide" if uneven else ""


def _pipeline_problem(model: Any, folder: Path, ranks: int) -> str:
    """Return why the ranks cannot have some of the layers each; empty if they can."""
    inner: Any = getattr(model, "model", None)
    if not hasattr(inner, "pipeline"):
        return "mlx-lm cannot pipeline this family"
    if len(inner.layers) < ranks:
        return f"it has {len(inner.layers)} layers"
    if not (folder / "model.safetensors.index.json").is_file():
        return "it has no model.safetensors.index.json"
    return ""


def check_facts(hosts: Hosts, facts: Sequence[RankFacts], weights: int) -> None:
    """Raise `RankRefused` if a machine differs from the first one, or lacks memory."""
    local = sum(host.is_local for host in hosts.hosts)
    part = int(weights / len(facts) * _MARGIN)
    for rank, found in enumerate(facts):
        name = hosts.name_of(rank)
        for package, ours in facts[0].versions.items():
            if (theirs := found.versions.get(package)) != ours:
                raise RankRefused(
                    f"{name} has {package} {theirs} and rank 0 has {ours}: install the same "
                    "versions."
                )
        if found.fingerprint != facts[0].fingerprint:
            raise RankRefused(f"{name} has other weights, or another tokenizer, than rank 0.")
        free = found.free_bytes // (local if hosts.hosts[rank].is_local else 1)
        if free < part:
            raise RankRefused(
                f"{name} has {free / 1e9:.1f} GB of memory free, and its part of the model needs "
                f"{part / 1e9:.1f} GB: close programs, add a machine, or choose a smaller model."
            )


def refuse_unsupported(generation: Generation) -> None:
    """Raise `InvalidGeneration` for a request that mlx-lm's generator cannot serve."""
    asked: dict[str, bool | Constraint | None] = {
        "messages": bool(generation.prompt.pictures),
        "response_format": generation.constraint,
        "echo": generation.prompt_logprobs,
        "min_tokens": generation.min_tokens > 0,
        "ignore_eos": generation.ignore_eos,
        "exact": generation.exact,
        "thinking_token_budget": generation.thinking_budget is not None,
        "top_logprobs": (generation.top_logprobs or 0) > _MAX_TOP_LOGPROBS,
    }
    name = next((name for name, is_asked in asked.items() if is_asked), None)
    if name is not None:
        raise InvalidGeneration(
            name,
            f"'{name}' is not available for a model on several machines.",
            code="unsupported_value",
        )
