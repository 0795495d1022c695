"""Self-test of the MTP head, and the lane of an unhealthy head."""

from typing import Any

import mlx.core as mx
import pytest

from workers.engine.startup.self_test import MIN_STEPS, HeadHealth, check_head, warm_up


class FaultyHead:
    """The head of the demo with a fault in `draft`."""

    def __init__(self, head: Any, *, fault: Any = None) -> None:
        self._head = head
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def draft(self, hidden: mx.array, further: mx.array) -> mx.array:
        if self._fault is None:
            raise ValueError("[matmul] shapes (1,64) and (96,64) do not fit")
        return self._fault(self._head.draft(hidden, further))


def test_the_head_of_the_demo_is_healthy_and_reports_its_acceptance(
    make_lane, prompt_renderer
) -> None:
    lane = make_lane()
    warm_up(lane, prompt_renderer, 2)
    health = check_head(lane, prompt_renderer)

    assert health.healthy
    assert health.steps > MIN_STEPS
    assert health.description.startswith("MTP head healthy: ")


def test_a_head_with_wrong_drafts_is_unhealthy_and_the_description_names_causes(
    make_lane, prompt_renderer, checkpoint
) -> None:
    faulty = FaultyHead(checkpoint.head, fault=lambda token: (token + 1) % checkpoint.vocabulary)
    health = check_head(make_lane(head=faulty), prompt_renderer)

    assert not health.healthy
    for cause in ("RMSNorm", "missing", "revision", "quantised"):
        assert cause in health.description
    assert "needs bfloat16" not in health.description, "heads draft in eight bits too"


def test_a_head_that_raises_is_unhealthy_and_the_model_starts_without_it(
    make_lane, prompt_renderer, checkpoint, ask
) -> None:
    lane = make_lane(head=FaultyHead(checkpoint.head))
    warm_up(lane, prompt_renderer, 2)
    health = check_head(lane, prompt_renderer)
    result = ask(lane, "Hello")

    assert not health.healthy
    assert "it failed in" in health.description
    assert "matmul" not in health.description, "the message of the library is only logged"
    assert result.row.answer


@pytest.mark.parametrize(("steps", "acceptance"), [(MIN_STEPS - 1, 0.0), (400, 0.2)])
def test_a_head_with_few_steps_or_low_acceptance_is_healthy(steps: int, acceptance: float) -> None:
    assert HeadHealth(first_token_acceptance=acceptance, steps=steps).healthy
