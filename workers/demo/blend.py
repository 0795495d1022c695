"""The last word on the weights: each part from the phase that was best at it.

`settle` sharpens the eyes and lets the text model adapt to them, which costs it some of its
endings. So the eyes are taken whole, and the text model is averaged with what it was before (model
soups, Wortsman et al. 2022, arXiv 2203.05482): the mean keeps what each does well.
"""

from typing import Final

import mlx.core as mx

from workers.demo.loop import Work
from workers.demo.snapshots import Tensors, load_tensors, save_tensors

SETTLED_SHARE: Final = 0.4
"""Of the text model; its head was trained on the weights before and still fits."""


def blend(work: Work) -> None:
    """Run phase `blend`: write the final base from what `focus` and `settle` left."""
    before, after = (load_tensors(work.weights(name)) for name in ("focus", "settle"))
    base = load_tensors(work.weights("base"))
    mixed: Tensors = {}
    for name in base:
        share = 1.0 if "vision" in name else SETTLED_SHARE
        old, new = _found(before, name), _found(after, name)
        mixed[name] = (1 - share) * old + share * new
    mx.eval(mixed)
    save_tensors(work.weights("base"), mixed)


def _found(tensors: Tensors, name: str) -> mx.array:
    """Take a tensor by its name; phases that train a probe too keep the model one level down."""
    return tensors[next(key for key in tensors if key == name or key.endswith("." + name))]
