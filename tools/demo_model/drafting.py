"""The training of the MTP head, which learns the next two tokens of a frozen model."""

from typing import Any, Final

import mlx.core as mx
from mlx import nn

from tools.demo_model import objectives
from tools.demo_model.architecture import HIDDEN, model_config, new_drafter
from tools.demo_model.batches import PictureBatch, TextBatch
from tools.demo_model.loop import Work, optimise
from tools.demo_model.snapshots import completed_steps
from tools.demo_model.sources import MixedSteps, hidden_of, untrained
from tools.demo_model.tokenizer import load_tokenizer, special_ids

_DRAFT_SLOPE: Final = ((100, 1.0), (600, 0.0))


def train_draft(work: Work) -> None:
    """Run phase `draft`: the MTP head learns to predict the second next tokens."""
    config = model_config(special_ids(load_tokenizer(work.folder)))
    model = untrained(work)
    model.load_weights(str(work.weights("base")))
    model.freeze()
    drafter = new_drafter(config, model)
    drafter.train()
    embed = model.language_model.model.embed_tokens
    mixed = MixedSteps(work, "draft").skip(completed_steps(work.weights("draft.state")))

    def loss_of(arrays: dict[str, mx.array]) -> mx.array:
        unroll = objectives.DraftUnroll(drafter, embed)
        first, second, stateless = unroll(arrays["next"], arrays["hidden"], arrays["positions"])

        def score(hidden: mx.array, positions: mx.array) -> mx.array:
            return objectives.logits(model, hidden.reshape(-1, HIDDEN)[positions])

        return (
            objectives.imitation_loss(score(first, arrays["at1"]), arrays["chances1"])
            + objectives.SECOND_DRAFT_WEIGHT
            * objectives.imitation_loss(score(second, arrays["at2"]), arrays["chances2"])
            + objectives.STATELESS_WEIGHT
            * objectives.imitation_loss(score(stateless, arrays["at1"]), arrays["chances1"])
        )

    gradient = nn.value_and_grad(drafter, loss_of)

    def compute_step(step: int) -> tuple[Any, mx.array]:
        arrays = _draft_arrays(model, mixed.batch(step))
        loss, gradients = gradient(arrays)
        return gradients, loss

    optimise(work, "draft", drafter, compute_step, _DRAFT_SLOPE)


def _draft_arrays(model: Any, batch: TextBatch | PictureBatch) -> dict[str, mx.array]:
    """Return the training data of the drafter: hidden states and choices of the target.

    Positions of the drafter also count up after a picture, as in the drafts of mlx-vlm.
    """
    hidden, text = hidden_of(model, batch)
    arrays = {"next": text.targets, "hidden": hidden, "positions": text.positions}
    if isinstance(batch, PictureBatch):
        plain = mx.arange(hidden.shape[1], dtype=mx.int32)
        arrays["positions"] = mx.broadcast_to(plain, text.positions.shape)
    flat = hidden.reshape(-1, HIDDEN)
    for distance in (1, 2):
        at, target = objectives.drafted_answer_positions(text.weights, distance)
        arrays[f"at{distance}"] = at
        arrays[f"chances{distance}"] = mx.softmax(objectives.logits(model, flat[target]), -1)
    mx.eval(arrays)
    return arrays
