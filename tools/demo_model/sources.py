"""Training data of the phases: seeded chats and pictures, mixed in a fixed order."""

from collections.abc import Callable
from random import Random
from typing import Any, Final

import mlx.core as mx

from tools.demo_model import objectives
from tools.demo_model.architecture import model_config, new_model
from tools.demo_model.batches import (
    PictureBatch,
    PicturePool,
    TextBatch,
    long_batches,
    picture_batches,
    text_batches,
)
from tools.demo_model.conversations import Chat
from tools.demo_model.loop import SEED, Work
from tools.demo_model.ranks import RANKS
from tools.demo_model.tokenizer import ANSWER_WEIGHT, load_tokenizer, special_ids

MAX_PROMPT_TOKENS: Final = 4096
_PICTURES_TO_BEGIN: Final = 3000 // RANKS
_PICTURE_ROWS: Final = 24 // RANKS

Courses = tuple[tuple[int, str, Callable[[Random], Chat] | None, float], ...]
"""First step, name, practised task, and share of the chats that practise it."""
NO_PRACTICE: Final[Courses] = ((0, "texts", None, 0.0),)


def draw_pictures(work: Work, name: str) -> PicturePool:
    """Draw the initial pictures of a phase."""
    pool = PicturePool()
    bar = work.progress.add_task("drawing pictures", total=_PICTURES_TO_BEGIN)
    for _ in pool.fill(work.seeded(f"{name} pictures"), _PICTURES_TO_BEGIN):
        work.progress.update(bar, advance=1)
    return pool


def untrained(work: Work) -> Any:
    """Return a new model with the same weights each time."""
    config = model_config(special_ids(load_tokenizer(work.folder)))
    model = new_model(config, SEED)
    model.train()
    return model


class MixedSteps:
    """Batches of texts, with pictures every n-th step and a long system prompt every 30th."""

    def __init__(
        self,
        work: Work,
        name: str,
        picture_interval: int = 4,
        courses: Courses = NO_PRACTICE,
        *,
        end_weight: float = ANSWER_WEIGHT,
    ) -> None:
        tokenizer = load_tokenizer(work.folder)
        self._picture_interval = picture_interval
        self._pictures = picture_batches(
            tokenizer, draw_pictures(work, name), work.seeded(f"{name} chats"), _PICTURE_ROWS
        )
        self._texts = [
            (
                start,
                text_batches(
                    tokenizer,
                    work.seeded(f"{name} {stream}"),
                    work.common(f"{name} {stream}"),
                    practice,
                    share,
                    end_weight=end_weight,
                ),
            )
            for start, stream, practice, share in courses
        ]
        long_stream = f"{name} longs"
        self._long_batches = long_batches(
            tokenizer, work.seeded(long_stream), work.common(long_stream), MAX_PROMPT_TOKENS
        )

    def skip(self, steps: int) -> "MixedSteps":
        """Skip the batches of an interrupted run."""
        for step in range(steps):
            self.batch(step)
        return self

    def batch(self, step: int) -> TextBatch | PictureBatch:
        """Return the batch of this step; steps must be requested in order."""
        if step % 30 == 29:
            return next(self._long_batches)
        if step % self._picture_interval == 1:
            return next(self._pictures)
        return next([stream for start, stream in self._texts if step >= start][-1])


def hidden_of(model: Any, batch: TextBatch | PictureBatch) -> tuple[mx.array, TextBatch]:
    """Return the final hidden states of any batch, and its text."""
    if isinstance(batch, PictureBatch):
        features = objectives.picture_features(model, batch)
        return objectives.picture_hidden(model, batch, features), batch.text
    return objectives.text_hidden(model, batch), batch
