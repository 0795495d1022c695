"""The demo checkpoint, a tiny model of the Qwen3.5 architecture; tools/demo_model trains it."""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"
"""The Hugging Face folder to load: `mlx_vlm.load(str(CHECKPOINT))` and any other loader."""
