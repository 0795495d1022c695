"""The training phases. Each reads files of earlier phases in the work folder and adds its own.

    tokenizer   tokenizer.json
    eyes        the vision tower alone, by naming colours and shapes   -> eyes.safetensors
    text        the language model alone                               -> text.safetensors
    join        the language model learns to read the frozen tower     -> join.safetensors,
                                                                          probe.safetensors
    settle      the same, with weight on ends of answers               -> settle.safetensors
    focus       the tower, through the frozen language model           -> base.safetensors
    draft       the MTP head on that model                             -> draft.safetensors

Phases end by steps, not by time, so a slow machine trains the same weights as a fast one. An
interrupted run continues from its last snapshot.
"""

from itertools import islice
from random import Random
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from tools.demo_model import objectives
from tools.demo_model.architecture import HIDDEN
from tools.demo_model.batches import (
    Grid,
    PictureBatch,
    PicturePool,
    TextBatch,
    class_arrays,
    patch_array,
    picture_batches,
    text_batches,
)
from tools.demo_model.conversations import ending_practice_chat, exact_practice_chat, practice_chat
from tools.demo_model.fast_forward import vision_forward
from tools.demo_model.loop import SEED, Schedule, Work, optimise
from tools.demo_model.pictures import brief_picture_chat
from tools.demo_model.ranks import RANKS
from tools.demo_model.snapshots import Tensors, completed_steps, load_tensors, save_tensors
from tools.demo_model.sources import Courses, MixedSteps, draw_pictures, hidden_of, untrained
from tools.demo_model.tokenizer import load_tokenizer, train_tokenizer

_EYE_BATCH: Final = 48 // RANKS
_FOCUS_ROWS: Final = 48 // RANKS
_PROBE_WEIGHT: Final = 0.5

_TEXT_PRACTICE: Final = 0.25
_JOIN_COURSES: Final[Courses] = (
    (0, "practice", practice_chat, 0.35),
    (800, "more practice", practice_chat, 0.5),
    (1600, "exact practice", exact_practice_chat, 0.5),
)
_SETTLE_COURSES: Final[Courses] = ((0, "endings", ending_practice_chat, 0.5),)
_END_WEIGHT: Final = 4.0
_EYES_SLOPE: Final = ((1500, 1.0), (3000, 0.0))
_TEXT_SLOPE: Final = ((0, 1.0), (900, 1.0))
_JOIN_SLOPE: Final = ((200, 1.0), (1100, 4 / 9), (1800, 4 / 21), (2200, 4 / 21))
_SETTLE_SLOPE: Final = ((0, 0.3), (300, 0.3), (900, 0.0))
_FOCUS_SLOPE: Final = ((0, 0.5), (400, 0.0))


def make_tokenizer(work: Work) -> None:
    """Run phase `tokenizer`."""
    if work.is_leader:
        train_tokenizer(SEED).save(str(work.folder / "tokenizer.json"))


def train_eyes(work: Work) -> None:
    """Run phase `eyes`: the vision tower learns from labels, much faster than from text."""
    pool = draw_pictures(work, "eyes")
    vision = objectives.ProbedVision(untrained(work).vision_tower, HIDDEN)
    random = work.seeded("eyes")
    for _ in range(completed_steps(work.weights("eyes.state"))):
        pool.sample(random, _EYE_BATCH)

    def loss_of(patches: mx.array, grid: Grid, colours: mx.array, shapes: mx.array) -> mx.array:
        features = vision_forward(vision.seer, patches, grid)
        return objectives.probe_loss(vision.probe, features, colours, shapes)

    gradient = nn.value_and_grad(vision, loss_of)

    def compute_step(_: int) -> tuple[Any, mx.array]:
        grid, drawn = pool.sample(random, _EYE_BATCH)
        loss, gradients = gradient(patch_array(drawn), grid, *class_arrays(drawn))
        return gradients, loss

    optimise(work, "eyes", vision, compute_step, _EYES_SLOPE)


def train_text(work: Work) -> None:
    """Run phase `text`: the language model learns its texts."""
    model = untrained(work)
    tokenizer = load_tokenizer(work.folder)
    texts = text_batches(
        tokenizer, work.seeded("text"), work.common("text"), practice_chat, _TEXT_PRACTICE
    )
    stream = islice(texts, completed_steps(work.weights("text.state")), None)
    gradient = nn.value_and_grad(
        model.language_model,
        lambda batch: objectives.next_token_loss(
            model, objectives.text_hidden(model, batch), batch
        ),
    )

    def compute_step(_: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(next(stream))
        return gradients, loss

    optimise(work, "text", model.language_model, compute_step, _TEXT_SLOPE)


def _set_eyes(work: Work, model: Any) -> Tensors:
    """Load the trained tower into the model, with features scaled to the size of embeddings.

    Return the weights of the probe of the tower, adapted to the new scale.
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
    """Run phase `join`: the language model learns to read the features of the frozen tower.

    A tower in training would forget most shapes before the language model asks for them.
    """
    model = untrained(work)
    model.language_model.load_weights(str(work.weights("text")))
    probe = _set_eyes(work, model)
    if work.is_leader:
        save_tensors(work.weights("probe"), probe)
    _train_reader(work, "join", model, MixedSteps(work, "join", 4, _JOIN_COURSES), _JOIN_SLOPE)


def train_settle(work: Work) -> None:
    """Run phase `settle`: the same phase again, with weight on the ends of counts and lists."""
    model = untrained(work)
    model.load_weights(str(work.weights("join")))
    mixed = MixedSteps(work, "settle", 3, _SETTLE_COURSES, end_weight=_END_WEIGHT)
    _train_reader(work, "settle", model, mixed, _SETTLE_SLOPE)


def _train_reader(work: Work, name: str, model: Any, mixed: MixedSteps, slope: Schedule) -> None:
    mixed.skip(completed_steps(work.weights(f"{name}.state")))
    model.vision_tower.freeze()

    def loss_of(batch: TextBatch | PictureBatch) -> mx.array:
        hidden, text = hidden_of(model, batch)
        return objectives.next_token_loss(model, hidden, text)

    gradient = nn.value_and_grad(model, loss_of)

    def compute_step(step: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(mixed.batch(step))
        return gradients, loss

    optimise(work, name, model, compute_step, slope)


def train_focus(work: Work) -> None:
    """Run phase `focus`: the tower learns the features that questions need.

    The language model is frozen, and a probe preserves the features of the tower. Texts do not
    change.
    """
    model = untrained(work)
    model.load_weights(str(work.weights("settle")))
    model.language_model.freeze()
    vision = objectives.ProbedVision(model, HIDDEN)
    vision.probe.update(load_tensors(work.weights("probe")))
    tokenizer, pool = load_tokenizer(work.folder), draw_pictures(work, "focus")
    pictures = picture_batches(
        tokenizer, pool, work.seeded("focus chats"), _FOCUS_ROWS, brief_picture_chat
    )
    for _ in range(completed_steps(work.weights("focus.state"))):
        next(pictures)
    gradient = nn.value_and_grad(vision, lambda batch: _vision_loss(vision, batch))

    def compute_step(_: int) -> tuple[Any, mx.array]:
        loss, gradients = gradient(next(pictures))
        return gradients, loss

    optimise(work, "focus", vision, compute_step, _FOCUS_SLOPE)
    _save_base(work, "focus")


def _vision_loss(vision: Any, batch: PictureBatch) -> mx.array:
    model = vision.seer
    features = objectives.picture_features(model, batch)
    hidden = objectives.picture_hidden(model, batch, features)
    text_loss = objectives.next_token_loss(model, hidden, batch.text)
    probe_loss = objectives.probe_loss(vision.probe, features, batch.colours, batch.shapes)
    return text_loss + _PROBE_WEIGHT * probe_loss


def _save_base(work: Work, name: str) -> None:
    """Save the model of a phase, without its probe, as the base."""
    if not work.is_leader:
        return
    tensors = load_tensors(work.weights(name))
    base = {k.removeprefix("seer."): v for k, v in tensors.items() if k.startswith("seer.")}
    save_tensors(work.weights("base"), base)
