"""Differences between families of mlx-vlm's language models: records, found by model type.

A module has the record of a family, or of several that differ in little.
"""

from typing import Any

from workers.engine.model.families import gemma2, gemma4, lfm2, llama4, mrope, nextn, qwen3_next
from workers.engine.model.families.family import Family

_MODULES = (gemma2, gemma4, lfm2, llama4, mrope, nextn, qwen3_next)
_FAMILIES = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}
"""By the name of mlx-vlm's package with the language model."""


def family_of(language: Any) -> Family:
    """Return the family of a language model, or of the one whose class it extends."""
    for kind in type(language).__mro__:
        model_type = kind.__module__.removeprefix("mlx_vlm.models.").partition(".")[0]
        if model_type in _FAMILIES:
            return _FAMILIES[model_type]
    return Family()
