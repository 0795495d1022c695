"""Functions that MLX compiles for each shape, and drops again."""

from __future__ import annotations

import mlx.core as mx

from workers.engine.step_graph import COMPILED_STEPS, Compiled, CompiledSteps


def test_the_least_recently_used_shapes_are_compiled_again() -> None:
    traced: list[int] = []

    def double(values: mx.array, layers: list[tuple[mx.array, ...]], more: int) -> mx.array:
        traced.append(values.shape[0])
        return 2 * values + layers[-1][0].sum() + more

    def call(rows: int, slots: int = 3) -> object:
        return compiled(mx.ones(rows), [(mx.ones(1),), (mx.ones(slots),)], 1).tolist()

    steps = CompiledSteps()
    compiled = Compiled(double, steps)
    for rows in range(1, COMPILED_STEPS + 1):
        assert call(rows) == [6.0] * rows
    assert len(steps) == COMPILED_STEPS
    del traced[:]
    assert call(1) == [6.0]
    assert traced == []  # it is kept, and the most recently used now
    assert call(1, slots=5) == [8.0]
    assert traced == [1]  # other slots are another shape, for which that of two rows is dropped
    assert call(1) == [6.0]
    assert traced == [1]
    assert call(2) == [6.0, 6.0]
    assert traced == [1, 2]
    assert len(steps) == COMPILED_STEPS


def test_n3_all_functions_of_an_engine_share_one_limit_and_no_result() -> None:
    steps = CompiledSteps()
    functions = [Compiled(lambda values, n=n: values + n, steps) for n in range(3)]
    for rows in range(1, COMPILED_STEPS // 2):
        for n, function in enumerate(functions):
            assert function(mx.ones(rows)).tolist() == [1.0 + n] * rows
    assert len(steps) == COMPILED_STEPS


def test_an_answer_is_right_if_two_shapes_are_taken_for_one() -> None:
    steps = CompiledSteps()
    compiled = Compiled(lambda layers: layers[1][0] * 2, steps)
    ends = (mx.ones(2),)
    for middle in (3, 4, 3):
        answer = compiled([ends, (mx.ones(middle),), ends])
        assert answer.tolist() == [2.0] * middle
    assert len(steps) == 1
