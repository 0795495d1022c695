"""Pools in the policy document: which lanes of which workers belong together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from policies.base import SAYS_SOMETHING, Label, Names, Part, listed

_LARGEST_WEIGHT = 1000

Labels = Annotated[
    tuple[Label, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(
        listed, json_schema_input_type=Label | Annotated[list[Label], Field(min_length=1)]
    ),
]
Weight = Annotated[float, Field(gt=0, le=_LARGEST_WEIGHT, allow_inf_nan=False)]


class PoolWorkers(Part):
    """Which workers belong to a pool: all that is given must hold; of a list, one is enough."""

    model_config = SAYS_SOMETHING

    labels: Labels | None = None
    """Labels of workers (`paceline worker --label`)."""
    models: Names | None = None
    """Models that workers serve, by their own names."""

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not self.model_fields_set:
            raise PydanticCustomError("workers", "it needs 'labels', 'models' or both")
        return self


class Queue(Part):
    """The waiting line in front of a pool whose slots are all taken."""

    limit: int = Field(default=128, ge=0)
    """So many may wait for a slot; more get 503 at once."""
    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """So long one may wait; then 503."""


class Pool(Part):
    """The lanes of these names, on all workers or on some, that together make one pool."""

    lanes: Names
    """Lanes of workers: text-mtp, vlm, or whatever else a worker names its lanes."""
    workers: PoolWorkers | None = None
    """Only these workers; without it, all."""
    weights: dict[Label, Weight] = Field(default_factory=dict)
    """By label of workers: one of weight 2 gets twice the share; 1 where nothing is said."""
    slots: int | None = Field(default=None, ge=1)
    """Requests that the whole pool may have at a time, beside the slots of its workers."""
    queue: Queue = Queue()
    """The waiting line in front of the pool."""

    def takes(self, labels: Collection[str], models: Collection[str]) -> bool:
        """Say whether a worker of these labels and models belongs to the pool."""
        chosen = self.workers
        return chosen is None or (
            (chosen.labels is None or any(label in labels for label in chosen.labels))
            and (chosen.models is None or any(model in models for model in chosen.models))
        )

    def bounded(self, slots: int) -> int:
        """Tell how many of its workers' slots the pool may use."""
        return slots if self.slots is None else min(slots, self.slots)

    def weight(self, labels: Collection[str]) -> float:
        """Tell the weight of a worker with these labels: of several, the largest counts."""
        told = [weight for label, weight in self.weights.items() if label in labels]
        return max(told, default=1.0)
