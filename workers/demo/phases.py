"""The training phases. Each reads what earlier ones left in the work folder and adds its own file.

    tokenizer   tokenizer.json
    eyes        the vision tower alone, by naming colours and shapes   -> eyes.safetensors
    text        the language model alone                               -> text.safetensors
    join        both together, long system prompts among the chats     -> base.safetensors
    mtp         the MTP head on the frozen base                        -> mtp.safetensors
    polish      the vision tower, through the frozen language model    -> tower.safetensors

`eyes` and `text` need each other not at all and may run at once; so may `mtp` and `polish`. Steps
are counted, not minutes, so a run gives the same weights on a slow machine as on a fast one. A
broken run goes on from its last snapshot.
"""

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from workers.demo import objectives
from workers.demo.architecture import HIDDEN, model_config, new_drafter, new_model
from workers.demo.batches import (
    PictureBatch,
    PicturePool,
    TextBatch,
    long_batches,
    patch_array,
    picture_batches,
    text_batches,
)
from workers.demo.conversations import exact_practice_chat, practice_chat
from workers.demo.fast_forward import vision_forward
from workers.demo.loop import Work, level_then_down, optimise
from workers.demo.snapshots import load_tensors, steps_done
from workers.demo.tokenizer import load_tokenizer, special_ids, train_tokenizer
from workers.demo.world import PICTURE_COLOURS, PICTURE_SHAPES

SEED: Final = 20
_EYE_BATCH: Final = 48
_PICTURE_ROWS: Final = 24
_POLISH_ROWS: Final = 32
_JOIN_SLOPE: Final = ((200, 1.0), (1200, 4 / 9), (2000, 4 / 21), (2600, 4 / 21), (3100, 0.0))
_PRACTICE: Final = (
    (0, "texts", None, 0.0),
    (700, "practice", practice_chat, 0.35),
    (1200, "more practice", practice_chat, 0.5),
    (2000, "exact practice", exact_practice_chat, 0.5),
)
"""From which step of `join` on, what share of the chats practises what."""


def _random(name: str) -> Random:
    return Random(f"{SEED} {name}")


def _draw_pictures(work: Work, name: str) -> PicturePool:
    pool = PicturePool()
    bar = work.progress.add_task("drawing pictures", total=work.pictures)
    for _ in pool.fill(_random(f"{name} pictures"), work.pictures):
        work.progress.update(bar, advance=1)
    return pool


def _untrained(work: Work) -> Any:
    config = model_config(special_ids(load_tokenizer(work.folder)))
    model = new_model(config, SEED)
    model.train()
    return model


def make_tokenizer(work: Work) -> None:
    """Phase `tokenizer`."""
    train_tokenizer(SEED).save(str(work.folder / "tokenizer.json"))


def train_eyes(work: Work, steps: int) -> None:
    """Phase `eyes`: the vision tower learns to see with labels, far sooner than through words."""
    pool = _draw_pictures(work, "eyes")
    test = objectives.EyeTest(_untrained(work).vision_tower, HIDDEN)
    random = _random("eyes")
    for _ in range(steps_done(work.weights("eyes.state"))):
        pool.sample(random, _EYE_BATCH)
    gradient = nn.value_and_grad(test, test.loss)

    def take_step(_: int) -> tuple[Any, mx.array]:
        grid, drawn = pool.sample(random, _EYE_BATCH)
        colours = mx.array([PICTURE_COLOURS.index(picture.colour) for picture in drawn])
        shapes = mx.array([_shape_class(picture.shape) for picture in drawn])
        loss, gradients = gradient(patch_array(drawn), grid, colours, shapes)
        return gradients, loss

    optimise(work, "eyes", test, take_step, level_then_down(steps, steps // 2))


def _shape_class(shape: str) -> int:
    return PICTURE_SHAPES.index(shape) if shape in PICTURE_SHAPES else len(PICTURE_SHAPES)


def train_text(work: Work, steps: int) -> None:
    """Phase `text`: the language model alone learns its world."""
    model = _untrained(work)
    stream = _resumable(work, "text", text_batches(load_tokenizer(work.folder), _random("text")))
    gradient = nn.value_and_grad(
        model.language_model,
        lambda batch: objectives.next_token_loss(
            model, objectives.text_hidden(model, batch), batch
        ),
    )

    def take_step(_: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(next(stream))
        return gradients, loss

    optimise(work, "text", model.language_model, take_step, ((0, 1.0), (steps, 1.0)))


def _resumable(work: Work, name: str, stream: Iterator[TextBatch]) -> Iterator[TextBatch]:
    return islice(stream, steps_done(work.weights(f"{name}.state")), None)


def _set_eyes(work: Work, model: Any) -> None:
    """Put the trained tower into the model, its features as large as the embeddings of words."""
    prefix = "tower."
    weights = load_tensors(work.weights("eyes"))
    tower = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    model.vision_tower.load_weights(list(tower.items()))
    pool = PicturePool()
    list(pool.fill(_random("measure"), 32))
    grid, drawn = pool.sample(_random("measure"), 32)
    features = vision_forward(model.vision_tower, patch_array(drawn), grid)
    words = model.language_model.model.embed_tokens.weight
    shrink = mx.sqrt((words * words).mean() / (features * features).mean())
    last = model.vision_tower.merger.linear_fc2
    last.weight, last.bias = last.weight * shrink, last.bias * shrink


class _MixedSteps:
    """The batches of `join` and `mtp`: pictures each fourth step, a long prompt each 30th."""

    def __init__(self, work: Work, name: str, longest: int) -> None:
        tokenizer = load_tokenizer(work.folder)
        self._pictures = picture_batches(
            tokenizer, _draw_pictures(work, name), _random(f"{name} chats"), _PICTURE_ROWS
        )
        self._texts = [
            (start, text_batches(tokenizer, _random(f"{name} {stream}"), practice, share))
            for start, stream, practice, share in _PRACTICE
        ]
        self._longs = long_batches(tokenizer, _random(f"{name} longs"), longest)

    def batch(self, step: int) -> TextBatch | PictureBatch:
        """Return the batch of this step; to be called for each step in turn."""
        if step % 30 == 29:
            return next(self._longs)
        if step % 4 == 1:
            return next(self._pictures)
        return next([stream for start, stream in self._texts if step >= start][-1])


def _hidden(model: Any, batch: TextBatch | PictureBatch) -> tuple[mx.array, TextBatch]:
    if isinstance(batch, PictureBatch):
        return objectives.picture_hidden(model, batch), batch.text
    return objectives.text_hidden(model, batch), batch


def train_joined(work: Work, longest: int) -> None:
    """Phase `join`: language model and vision tower together."""
    model = _untrained(work)
    model.language_model.load_weights(str(work.weights("text")))
    _set_eyes(work, model)
    mixed = _MixedSteps(work, "join", longest)
    for step in range(steps_done(work.weights("base.state"))):
        mixed.batch(step)

    def loss_of(batch: TextBatch | PictureBatch) -> mx.array:
        hidden, text = _hidden(model, batch)
        return objectives.next_token_loss(model, hidden, text)

    gradient = nn.value_and_grad(model, loss_of)

    def take_step(step: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(mixed.batch(step))
        return gradients, loss

    optimise(work, "base", model, take_step, _JOIN_SLOPE)


def train_polish(work: Work, steps: int) -> None:
    """Run phase `polish`: the tower learns to show the frozen language model what it needs."""
    model = _untrained(work)
    model.load_weights(str(work.weights("base")))
    model.language_model.freeze()
    tokenizer = load_tokenizer(work.folder)
    batches = picture_batches(
        tokenizer, _draw_pictures(work, "polish"), _random("polish chats"), _POLISH_ROWS
    )
    for _ in range(steps_done(work.weights("tower.state"))):
        next(batches)
    tower = model.vision_tower

    def loss_of(batch: PictureBatch) -> mx.array:
        hidden = objectives.picture_hidden(model, batch)
        return objectives.next_token_loss(model, hidden, batch.text)

    gradient = nn.value_and_grad(tower, loss_of)

    def take_step(_: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(next(batches))
        return gradients, loss

    optimise(work, "tower", tower, take_step, level_then_down(steps, 0))


def train_mtp(work: Work, steps: int, longest: int) -> None:
    """Phase `mtp`: the head learns to say what the frozen base would say one and two tokens on."""
    config = model_config(special_ids(load_tokenizer(work.folder)))
    model = new_model(config, SEED)
    model.load_weights(str(work.weights("base")))
    model.freeze()
    drafter = new_drafter(config, model)
    drafter.train()
    embed = model.language_model.model.embed_tokens
    mixed = _MixedSteps(work, "mtp", longest)
    for step in range(steps_done(work.weights("mtp.state"))):
        mixed.batch(step)

    def loss_of(arrays: dict[str, mx.array]) -> mx.array:
        unroll = objectives.DraftUnroll(drafter, embed)
        first, second, alone = unroll(arrays["next"], arrays["hidden"], arrays["positions"])

        def score(hidden: mx.array, places: mx.array) -> mx.array:
            return objectives.logits(model, hidden.reshape(-1, HIDDEN)[places])

        return (
            objectives.imitation_loss(score(first, arrays["at1"]), arrays["chances1"])
            + objectives.SECOND_DRAFT_WEIGHT
            * objectives.imitation_loss(score(second, arrays["at2"]), arrays["chances2"])
            + objectives.STATELESS_WEIGHT
            * objectives.imitation_loss(score(alone, arrays["at1"]), arrays["chances1"])
        )

    gradient = nn.value_and_grad(drafter, loss_of)

    def take_step(step: int) -> tuple[Any, mx.array]:
        arrays = _draft_arrays(model, mixed.batch(step))
        loss, gradients = gradient(arrays)
        return gradients, loss

    optimise(work, "mtp", drafter, take_step, level_then_down(steps, steps // 5))


def _draft_arrays(model: Any, batch: TextBatch | PictureBatch) -> dict[str, mx.array]:
    """Return what the drafter learns from: the target's hiddens and choices at the answers.

    The drafter counts plain positions, also behind a picture, as mlx-vlm's drafting does.
    """
    hidden, text = _hidden(model, batch)
    arrays = {"next": text.targets, "hidden": hidden, "positions": text.positions}
    if isinstance(batch, PictureBatch):
        plain = mx.arange(hidden.shape[1], dtype=mx.int32)
        arrays["positions"] = mx.broadcast_to(plain, text.positions.shape)
    flat = hidden.reshape(-1, HIDDEN)
    for ahead in (1, 2):
        at, target = objectives.drafted_answer_places(text.weights, ahead)
        arrays[f"at{ahead}"] = at
        arrays[f"chances{ahead}"] = mx.softmax(objectives.logits(model, flat[target]), -1)
    mx.eval(arrays)
    return arrays
