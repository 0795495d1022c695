"""Gemma 2, whose scores of grouped heads have an axis that a mask of several rows lacks."""

from types import SimpleNamespace

import mlx.core as mx

from workers.engine.model.families.family import Family
from workers.engine.model.kv_cache import RowCache


def _grouped(cache: RowCache) -> SimpleNamespace:
    """Return a cache with masks [rows, 1, 1, L, slots]."""

    def make_mask(length: int, **options: object) -> mx.array:
        return cache.make_mask(length, **options)[:, None]  # type: ignore[arg-type]

    return SimpleNamespace(
        offset=cache.offset, make_mask=make_mask, update_and_fetch=cache.update_and_fetch
    )


FAMILIES = {"gemma2": Family(adapt=_grouped)}
