"""The functions of the training compute the same values as those of mlx and mlx-vlm."""

from collections.abc import Callable
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_vlm import load

from tools.demo_model import fast_math
from tools.demo_model.architecture import PATCH
from tools.demo_model.batches import PicturePool, patch_array
from tools.demo_model.fast_forward import CHUNK, QUERIES_AT_ONCE, text_forward, vision_forward
from workers.demo import CHECKPOINT

Function = Callable[[mx.array], mx.array]

VISIBLE = mx.tril(mx.ones((7, 50)), 20)
TARGETS = mx.arange(7) * 7


@pytest.fixture(scope="module")
def model() -> Any:
    loaded, _ = load(str(CHECKPOINT))
    loaded.set_dtype(mx.float32)
    return loaded


@pytest.mark.parametrize(
    ("fast", "plain"),
    [
        (fast_math.sigmoid, mx.sigmoid),
        (fast_math.silu, nn.silu),
        (fast_math.gelu, nn.gelu_approx),
        (
            lambda x: fast_math.masked_softmax(x, VISIBLE),
            lambda x: mx.softmax(mx.where(VISIBLE > 0, x, -1e9), -1),
        ),
        (
            lambda x: fast_math.cross_entropy(x, TARGETS)[:, None],
            lambda x: nn.losses.cross_entropy(x, TARGETS)[:, None],
        ),
    ],
    ids=["sigmoid", "silu", "gelu", "masked softmax", "cross entropy"],
)
def test_a_fast_function_has_the_value_and_gradient_of_its_mlx_equivalent(fast, plain) -> None:
    x = mx.random.normal((7, 50), key=mx.random.key(1)) * 5
    weights = mx.random.normal((7, 50), key=mx.random.key(2))

    def value_and_gradient(function: Function) -> tuple[mx.array, mx.array]:
        value, gradient = mx.value_and_grad(lambda x: (function(x) * weights).sum())(x)
        return value, gradient

    for actual, expected in zip(value_and_gradient(fast), value_and_gradient(plain), strict=True):
        assert mx.allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [4 * CHUNK, 2 * QUERIES_AT_ONCE + CHUNK])
def test_text_of_any_length_has_the_hidden_states_of_the_library(model: Any, length: int) -> None:
    language = model.language_model.model
    tokens = mx.random.randint(0, 1500, (1, length), key=mx.random.key(3))
    positions = mx.broadcast_to(mx.arange(length)[None, None], (3, 1, length))

    actual = text_forward(language, language.embed_tokens(tokens), positions)

    assert mx.allclose(actual, language(tokens, position_ids=positions), rtol=1e-3, atol=5e-3)


def test_a_picture_has_the_features_of_the_library(model: Any) -> None:
    pool = PicturePool()
    list(pool.fill(Random(1), 4))
    grid, pictures = pool.sample(Random(2), 2)
    patches = patch_array(pictures)

    actual = vision_forward(model.vision_tower, patches, grid)
    frames = mx.repeat(patches[0].reshape(-1, 3, 1, PATCH * PATCH), 2, axis=2)  # as it is served
    expected, _ = model.vision_tower(frames.reshape(len(frames), -1), mx.array([[1, *grid]]))

    assert mx.allclose(actual[0], expected, rtol=1e-3, atol=1e-3)
