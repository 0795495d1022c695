"""The demo checkpoint, a tiny model of the Qwen3.5 architecture, and how it is made and scored."""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"
"""The Hugging Face folder to load: `mlx_vlm.load(str(CHECKPOINT))` and any other loader."""
