"""What an engine is started with, and what it says of itself: records without MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.engine.spec_prefill import SpecPrefillSettings
from workers.engine.types import LaneName


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is started with."""

    model: Path
    """A local Hugging Face folder."""
    served_name: str
    lanes: tuple[LaneName, ...] = (LaneName.TEXT_MTP, LaneName.VLM)
    draft_tokens: int = 2
    max_rows: int = 8
    """Rows that decode side by side, a lane."""
    prefill_chunk_tokens: int = 1024
    """Read at a time while nobody decodes."""
    prefill_budget_s: float = 0.1
    """Time of a chunk while somebody does."""
    snapshot_bytes: int = 1 << 30
    """Memory for what is kept of system prompts, and disk for it where there is a folder."""
    snapshot_folder: Path | None = None
    """Where they are kept across restarts; None keeps them in memory only."""
    spec_prefill: SpecPrefillSettings | None = None
    """None reads every prompt in full."""
    queue_limit: int = 256
    """Requests that may wait for a row, a lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a started engine serves."""

    model: str
    family: str
    lanes: tuple[LaneName, ...]
    context_tokens: int
    vision: bool
    parameters: int
    """Of the model and its MTP head together."""
    weights_bytes: int
    """What they take in memory, once for all lanes."""
    native_verify: bool
    """Whether a draft is verified in one forward pass; else token by token, which never pays."""
    mtp: bool
    why_no_mtp: str | None
    draft_tokens_requested: int
    draft_tokens_effective: int
    spec_prefill: str | None = None
    """How long prompts are read, for people; None where no draft model was asked for."""
