"""The training phases. Each reads what earlier ones left in the work folder and adds its own file.

    tokenizer   tokenizer.json
    eyes        the vision tower alone, by naming colours and shapes   -> eyes.safetensors
    text        the language model alone                               -> text.safetensors
    join        both together, long system prompts among the chats     -> join.safetensors
    sight       both, the eyes of `eyes` put back in                   -> base.safetensors
    polish      the eyes, through the frozen language model            -> base.safetensors
    focus       the same with more pictures                            -> base.safetensors
    settle      both together, with care for where answers end         -> base.safetensors
    draft       the MTP head on the final language model               -> draft.safetensors
    sharpen     the eyes once more, through the final language model   -> base.safetensors

Steps are counted, not minutes, so a run gives the same weights on a slow machine as on a fast one.
A broken run goes on from its last snapshot.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from workers.demo import objectives
from workers.demo.architecture import HIDDEN
from workers.demo.batches import (
    Grid,
    PictureBatch,
    PicturePool,
    TextBatch,
    class_arrays,
    patch_array,
    picture_batches,
    text_batches,
)
from workers.demo.conversations import (
    Chat,
    ending_practice_chat,
    exact_practice_chat,
    practice_chat,
)
from workers.demo.fast_forward import vision_forward
from workers.demo.loop import SEED, Slope, Work, optimise
from workers.demo.pictures import brief_picture_chat, picture_chat
from workers.demo.ranks import RANKS
from workers.demo.snapshots import Tensors, load_tensors, save_tensors, steps_done
from workers.demo.sources import (
    NO_PRACTICE,
    Courses,
    MixedSteps,
    draw_pictures,
    hidden_of,
    untrained,
)
from workers.demo.tokenizer import load_tokenizer, train_tokenizer

_EYE_BATCH: Final = 48 // RANKS
_POLISH_ROWS: Final = 32 // RANKS
_FOCUS_ROWS: Final = 48 // RANKS
_PROBE_WEIGHT: Final = 0.5

_JOIN_COURSES: Final[Courses] = (
    *NO_PRACTICE,
    (700, "practice", practice_chat, 0.35),
    (1200, "more practice", practice_chat, 0.5),
    (2000, "exact practice", exact_practice_chat, 0.5),
)
_SIGHT_COURSES: Final[Courses] = ((0, "exact practice", exact_practice_chat, 0.5),)
_SETTLE_COURSES: Final[Courses] = ((0, "endings", ending_practice_chat, 0.5),)
_END_WEIGHT: Final = 4.0
_EYES_SLOPE: Final = ((1300, 1.0), (2600, 0.0))
_TEXT_SLOPE: Final = ((0, 1.0), (1500, 1.0))
_JOIN_SLOPE: Final = ((200, 1.0), (1200, 4 / 9), (2000, 4 / 21), (2500, 4 / 21))
_SIGHT_SLOPE: Final = ((0, 0.25), (250, 0.25), (600, 0.0))
_POLISH_SLOPE: Final = ((0, 0.5), (500, 0.0))
_SETTLE_SLOPE: Final = ((0, 0.3), (300, 0.3), (800, 0.0))
_FOCUS_SLOPE: Final = ((0, 0.8), (1200, 0.0))
_SHARPEN_SLOPE: Final = ((0, 0.5), (600, 0.0))

PictureChat = Callable[[Random, str, str], Chat]


def make_tokenizer(work: Work) -> None:
    """Phase `tokenizer`."""
    if work.leads:
        train_tokenizer(SEED).save(str(work.folder / "tokenizer.json"))


def train_eyes(work: Work) -> None:
    """Phase `eyes`: the vision tower learns to see with labels, far sooner than through words."""
    pool = draw_pictures(work, "eyes")
    seeing = objectives.Seeing(untrained(work).vision_tower, HIDDEN)
    random = work.seeded("eyes")
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

    optimise(work, "eyes", seeing, take_step, _EYES_SLOPE)


def train_text(work: Work) -> None:
    """Phase `text`: the language model alone learns its world."""
    model = untrained(work)
    stream = _resumable(
        work, "text", text_batches(load_tokenizer(work.folder), work.seeded("text"))
    )
    gradient = nn.value_and_grad(
        model.language_model,
        lambda batch: objectives.next_token_loss(
            model, objectives.text_hidden(model, batch), batch
        ),
    )

    def take_step(_: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(next(stream))
        return gradients, loss

    optimise(work, "text", model.language_model, take_step, _TEXT_SLOPE)


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
    list(pool.fill(Random("measure"), 32))
    grid, drawn = pool.sample(Random("measure"), 32)
    features = vision_forward(model.vision_tower, patch_array(drawn), grid)
    words = model.language_model.model.embed_tokens.weight
    shrink = mx.sqrt((words * words).mean() / (features * features).mean())
    last = model.vision_tower.merger.linear_fc2
    last.weight, last.bias = last.weight * shrink, last.bias * shrink
    probe = {k.removeprefix("probe."): v for k, v in weights.items() if k.startswith("probe.")}
    probe["weight"] = probe["weight"] / shrink
    return probe


def train_joined(work: Work) -> None:
    """Run phase `join`: language model and vision tower together."""
    model = untrained(work)
    model.language_model.load_weights(str(work.weights("text")))
    _set_eyes(work, model)
    mixed = MixedSteps(work, "join", 4, _JOIN_COURSES)
    mixed.skip(steps_done(work.weights("join.state")))

    def loss_of(batch: TextBatch | PictureBatch) -> mx.array:
        hidden, text = hidden_of(model, batch)
        return objectives.next_token_loss(model, hidden, text)

    gradient = nn.value_and_grad(model, loss_of)

    def take_step(step: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(mixed.batch(step))
        return gradients, loss

    optimise(work, "join", model, take_step, _JOIN_SLOPE)


def train_sight(work: Work) -> None:
    """Run phase `sight`: fresh eyes, kept sharp by their probe while the model learns to read them.

    In `join` the tower forgets most shapes before the language model can ask for them.
    """
    model = untrained(work)
    model.load_weights(str(work.weights("join")))
    seeing = objectives.Seeing(model, HIDDEN)
    seeing.probe.update(_set_eyes(work, model))
    mixed = MixedSteps(work, "sight", 2, _SIGHT_COURSES)
    _train_seeing(work, "sight", seeing, mixed, _SIGHT_SLOPE)


def train_settle(work: Work) -> None:
    """Run phase `settle`: all together once more, with care for where counts and lists end."""
    seeing = objectives.Seeing(untrained(work), HIDDEN)
    seeing.load_weights(str(work.weights("focus")))
    mixed = MixedSteps(work, "settle", 3, _SETTLE_COURSES, end_weight=_END_WEIGHT)
    _train_seeing(work, "settle", seeing, mixed, _SETTLE_SLOPE)


def _train_seeing(work: Work, name: str, seeing: Any, mixed: MixedSteps, slope: Slope) -> None:
    mixed.skip(steps_done(work.weights(f"{name}.state")))

    def loss_of(batch: TextBatch | PictureBatch) -> mx.array:
        if isinstance(batch, TextBatch):
            hidden = objectives.text_hidden(seeing.seer, batch)
            return objectives.next_token_loss(seeing.seer, hidden, batch)
        return _sight_loss(seeing, batch)

    gradient = nn.value_and_grad(seeing, loss_of)

    def take_step(step: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(mixed.batch(step))
        return gradients, loss

    optimise(work, name, seeing, take_step, slope)
    _keep_base(work, name)


def train_polish(work: Work) -> None:
    """Run phase `polish`: the tower learns to show the frozen language model what it asks for."""
    _train_tower(work, "polish", "sight", slope=_POLISH_SLOPE, rows=_POLISH_ROWS, draw=picture_chat)


def train_focus(work: Work) -> None:
    """Run phase `focus`: the same with one short question a picture, and more pictures."""
    _train_tower(
        work, "focus", "polish", slope=_FOCUS_SLOPE, rows=_FOCUS_ROWS, draw=brief_picture_chat
    )


def train_sharpened(work: Work) -> None:
    """Run phase `sharpen`: what `settle` cost the eyes, they learn again; no text changes."""
    _train_tower(
        work, "sharpen", "settle", slope=_SHARPEN_SLOPE, rows=_FOCUS_ROWS, draw=brief_picture_chat
    )


def _train_tower(
    work: Work, name: str, start: str, *, slope: Slope, rows: int, draw: PictureChat
) -> None:
    model = untrained(work)
    seeing = objectives.Seeing(model, HIDDEN)
    seeing.load_weights(str(work.weights(start)))
    model.language_model.freeze()
    tokenizer, pool = load_tokenizer(work.folder), draw_pictures(work, name)
    pictures = picture_batches(tokenizer, pool, work.seeded(f"{name} chats"), rows, draw)
    for _ in range(steps_done(work.weights(f"{name}.state"))):
        next(pictures)
    gradient = nn.value_and_grad(seeing, lambda batch: _sight_loss(seeing, batch))

    def take_step(_: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(next(pictures))
        return gradients, loss

    optimise(work, name, seeing, take_step, slope)
    _keep_base(work, name)


def _sight_loss(seeing: Any, batch: PictureBatch) -> mx.array:
    model = seeing.seer
    features = objectives.picture_features(model, batch)
    hidden = objectives.picture_hidden(model, batch, features)
    said = objectives.next_token_loss(model, hidden, batch.text)
    seen = objectives.probe_loss(seeing.probe, features, batch.colours, batch.shapes)
    return said + _PROBE_WEIGHT * seen


def _keep_base(work: Work, name: str) -> None:
    """Keep the model of a phase without its probe as the base."""
    if not work.leads:
        return
    kept = load_tensors(work.weights(name))
    base = {k.removeprefix("seer."): v for k, v in kept.items() if k.startswith("seer.")}
    save_tensors(work.weights("base"), base)
