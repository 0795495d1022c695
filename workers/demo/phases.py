"""The training phases. Each reads what earlier ones left in the work folder and adds its own file.

    tokenizer   tokenizer.json
    eyes        the vision tower alone, by naming colours and shapes   -> eyes.safetensors
    text        the language model alone                               -> text.safetensors
    join        both together, long system prompts among the chats     -> joined.safetensors
    sight       both, the eyes of `eyes` put back in                   -> base.safetensors
    draft       the MTP head on the joined model                       -> draft.safetensors
    mtp         the same head on the final base                        -> mtp.safetensors

`eyes` and `text` need each other not at all and may run at once; so may `sight` and `draft`. Steps
are counted, not minutes, so a run gives the same weights on a slow machine as on a fast one. A
broken run goes on from its last snapshot.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from workers.demo import objectives
from workers.demo.architecture import HIDDEN, model_config, new_drafter, new_model
from workers.demo.batches import (
    Grid,
    PictureBatch,
    PicturePool,
    TextBatch,
    class_arrays,
    long_batches,
    patch_array,
    picture_batches,
    text_batches,
)
from workers.demo.conversations import Chat, exact_practice_chat, practice_chat
from workers.demo.fast_forward import vision_forward
from workers.demo.loop import Slope, Work, level_then_down, optimise
from workers.demo.snapshots import Tensors, load_tensors, save_tensors, steps_done
from workers.demo.tokenizer import load_tokenizer, special_ids, train_tokenizer

SEED: Final = 20
_EYE_BATCH: Final = 48
_PICTURE_ROWS: Final = 24
LONGEST_PROMPT: Final = 4096
_PROBE_WEIGHT: Final = 0.5

Courses = tuple[tuple[int, str, Callable[[Random], Chat] | None, float], ...]
"""From which step on, a name, what the chats practise, and what share of them."""
_NO_PRACTICE: Final[Courses] = ((0, "texts", None, 0.0),)
_JOIN_COURSES: Final[Courses] = (
    *_NO_PRACTICE,
    (700, "practice", practice_chat, 0.35),
    (1200, "more practice", practice_chat, 0.5),
    (2000, "exact practice", exact_practice_chat, 0.5),
)
_SIGHT_COURSES: Final[Courses] = ((0, "exact practice", exact_practice_chat, 0.5),)
_JOIN_SLOPE: Final = ((200, 1.0), (1200, 4 / 9), (2000, 4 / 21), (2500, 4 / 21))
_SIGHT_SLOPE: Final = ((0, 0.25), (250, 0.25), (600, 0.0))
_DRAFT_SLOPE: Final = ((80, 1.0), (450, 0.1))
_MTP_SLOPE: Final = ((0, 0.25), (150, 0.0))


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
    seeing = objectives.Seeing(_untrained(work).vision_tower, HIDDEN)
    random = _random("eyes")
    for _ in range(steps_done(work.weights("eyes.state"))):
        pool.sample(random, _EYE_BATCH)

    def loss_of(patches: mx.array, grid: Grid, colours: mx.array, shapes: mx.array) -> mx.array:
        features = vision_forward(seeing.seer, patches, grid)
        return objectives.probe_loss(seeing.probe, features, colours, shapes)

    gradient = nn.value_and_grad(seeing, loss_of)

    def take_step(_: int) -> tuple[Any, mx.array]:
        grid, drawn = pool.sample(random, _EYE_BATCH)
        loss, gradients = gradient(patch_array(drawn), grid, *class_arrays(drawn))
        return gradients, loss

    optimise(work, "eyes", seeing, take_step, level_then_down(steps, steps // 2))


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


def _set_eyes(work: Work, model: Any) -> Tensors:
    """Put the trained tower into the model, its features as large as the embeddings of words.

    Returns the weights of the probe that the tower was trained with, fit for the new size.
    """
    weights = load_tensors(work.weights("eyes"))
    tower = [(k.removeprefix("seer."), v) for k, v in weights.items() if k.startswith("seer.")]
    model.vision_tower.load_weights(tower)
    pool = PicturePool()
    list(pool.fill(_random("measure"), 32))
    grid, drawn = pool.sample(_random("measure"), 32)
    features = vision_forward(model.vision_tower, patch_array(drawn), grid)
    words = model.language_model.model.embed_tokens.weight
    shrink = mx.sqrt((words * words).mean() / (features * features).mean())
    last = model.vision_tower.merger.linear_fc2
    last.weight, last.bias = last.weight * shrink, last.bias * shrink
    probe = {k.removeprefix("probe."): v for k, v in weights.items() if k.startswith("probe.")}
    probe["weight"] = probe["weight"] / shrink
    return probe


class _MixedSteps:
    """Batches of texts, with pictures each n-th step and a long system prompt each 30th."""

    def __init__(
        self, work: Work, name: str, pictures_each: int = 4, courses: Courses = _NO_PRACTICE
    ) -> None:
        tokenizer = load_tokenizer(work.folder)
        self._pictures_each = pictures_each
        self._pictures = picture_batches(
            tokenizer, _draw_pictures(work, name), _random(f"{name} chats"), _PICTURE_ROWS
        )
        self._texts = [
            (start, text_batches(tokenizer, _random(f"{name} {stream}"), practice, share))
            for start, stream, practice, share in courses
        ]
        self._longs = long_batches(tokenizer, _random(f"{name} longs"), LONGEST_PROMPT)

    def skip(self, steps: int) -> "_MixedSteps":
        """Pass over the batches that a broken run has seen."""
        for step in range(steps):
            self.batch(step)
        return self

    def batch(self, step: int) -> TextBatch | PictureBatch:
        """Return the batch of this step; to be called for each step in turn."""
        if step % 30 == 29:
            return next(self._longs)
        if step % self._pictures_each == 1:
            return next(self._pictures)
        return next([stream for start, stream in self._texts if step >= start][-1])


def _hidden(model: Any, batch: TextBatch | PictureBatch) -> tuple[mx.array, TextBatch]:
    if isinstance(batch, PictureBatch):
        features = objectives.picture_features(model, batch)
        return objectives.picture_hidden(model, batch, features), batch.text
    return objectives.text_hidden(model, batch), batch


def train_joined(work: Work) -> None:
    """Run phase `join`: language model and vision tower together."""
    model = _untrained(work)
    model.language_model.load_weights(str(work.weights("text")))
    _set_eyes(work, model)
    mixed = _MixedSteps(work, "join", 4, _JOIN_COURSES)
    mixed.skip(steps_done(work.weights("joined.state")))

    def loss_of(batch: TextBatch | PictureBatch) -> mx.array:
        hidden, text = _hidden(model, batch)
        return objectives.next_token_loss(model, hidden, text)

    gradient = nn.value_and_grad(model, loss_of)

    def take_step(step: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(mixed.batch(step))
        return gradients, loss

    optimise(work, "joined", model, take_step, _JOIN_SLOPE)


def train_sight(work: Work) -> None:
    """Run phase `sight`: fresh eyes, kept sharp by their probe while the model learns to read them.

    In `join` the tower forgets most shapes before the language model can ask for them.
    """
    model = _untrained(work)
    model.load_weights(str(work.weights("joined")))
    seeing = objectives.Seeing(model, HIDDEN)
    seeing.probe.update(_set_eyes(work, model))
    mixed = _MixedSteps(work, "sight", 2, _SIGHT_COURSES)
    mixed.skip(steps_done(work.weights("sight.state")))

    def loss_of(batch: TextBatch | PictureBatch) -> mx.array:
        if isinstance(batch, TextBatch):
            hidden = objectives.text_hidden(model, batch)
            return objectives.next_token_loss(model, hidden, batch)
        features = objectives.picture_features(model, batch)
        hidden = objectives.picture_hidden(model, batch, features)
        said = objectives.next_token_loss(model, hidden, batch.text)
        seen = objectives.probe_loss(seeing.probe, features, batch.colours, batch.shapes)
        return said + _PROBE_WEIGHT * seen

    gradient = nn.value_and_grad(seeing, loss_of)

    def take_step(step: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(mixed.batch(step))
        return gradients, loss

    optimise(work, "sight", seeing, take_step, _SIGHT_SLOPE)
    kept = load_tensors(work.weights("sight"))
    base = {k.removeprefix("seer."): v for k, v in kept.items() if k.startswith("seer.")}
    save_tensors(work.weights("base"), base)


def train_draft(work: Work) -> None:
    """Run phase `draft`: the MTP head learns what the joined model will say next but one."""
    _train_head(work, "draft", "joined", _DRAFT_SLOPE)


def train_mtp(work: Work) -> None:
    """Run phase `mtp`: the head, trained beside `sight`, settles on the final base."""
    _train_head(work, "mtp", "base", _MTP_SLOPE, start="draft")


def _train_head(work: Work, name: str, base: str, slope: Slope, start: str = "") -> None:
    config = model_config(special_ids(load_tokenizer(work.folder)))
    model = new_model(config, SEED)
    model.load_weights(str(work.weights(base)))
    model.freeze()
    drafter = new_drafter(config, model)
    if start:
        drafter.load_weights(str(work.weights(start)))
    drafter.train()
    embed = model.language_model.model.embed_tokens
    mixed = _MixedSteps(work, name).skip(steps_done(work.weights(f"{name}.state")))

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

    optimise(work, name, drafter, take_step, slope)


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
