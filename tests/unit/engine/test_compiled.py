"""Functions that MLX compiles for each shape, and drops again."""

import sys
from collections.abc import Iterator

import mlx.core as mx
import pytest

from workers.engine.decode.step_graph import COMPILED_STEPS, CompiledSteps


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Let MLX compile; `no_kernel_compiler` forbids it to all other tests on Linux.

    No function here has arithmetic, for which MLX would start a C++ compiler.
    """
    mx.enable_compile()
    yield
    if sys.platform == "linux":
        mx.disable_compile()


def test_the_least_recently_used_shapes_are_compiled_again() -> None:
    traced: list[int] = []

    def join(values: mx.array, layers: list[tuple[mx.array, ...]], times: int) -> mx.array:
        traced.append(values.shape[0])
        return mx.concatenate([values, *[layers[-1][0]] * times])

    def call(rows: int, slots: int = 3) -> None:
        joined = compiled(mx.ones(rows), [(mx.ones(1),), (mx.ones(slots),)], 2)
        assert joined.tolist() == [1.0] * (rows + 2 * slots)

    steps = CompiledSteps()
    compiled = steps.compiled(join)
    for rows in range(1, COMPILED_STEPS + 1):
        call(rows)
    assert len(steps) == COMPILED_STEPS
    for rows, slots, anew in (
        (1, 3, []),  # it is kept, and the most recently used now
        (1, 5, [1]),  # other slots are another shape, for which that of two rows is dropped
        (1, 3, []),
        (2, 3, [2]),
    ):
        traced.clear()
        call(rows, slots)
        assert traced == anew
    assert len(steps) == COMPILED_STEPS


def test_n3_all_functions_of_an_engine_share_one_limit_and_no_result() -> None:
    steps = CompiledSteps()
    functions = [steps.compiled(lambda values, n=n: mx.tile(values, n)) for n in range(1, 4)]
    for rows in range(1, COMPILED_STEPS // 2):
        for n, function in enumerate(functions, 1):
            assert function(mx.ones(rows)).tolist() == [1.0] * n * rows
    assert len(steps) == COMPILED_STEPS


def test_an_answer_is_right_if_two_shapes_are_taken_for_one() -> None:
    steps = CompiledSteps()
    compiled = steps.compiled(lambda layers: mx.tile(layers[1][0], 2))
    ends = (mx.ones(2),)
    for middle in (3, 4, 3):
        answer = compiled([ends, (mx.ones(middle),), ends])
        assert answer.tolist() == [1.0] * 2 * middle
    assert len(steps) == 1
