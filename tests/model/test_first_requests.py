"""The first requests of a new user: greedy, sampled and with a picture; streamed and not."""

from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.openai_requests import ChatResult, picture_body, send_chat, text_body
from tests.support.served_engine import DemoGateway


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "streamed"])
def test_greedy_text_runs_in_the_speculative_lane_and_reports_its_acceptance(
    demo: DemoGateway, openai_client: OpenAI, stream: bool
) -> None:
    body = text_body(demo.model, temperature=0, extra_body={"draft_tokens": 2})
    reason = reason_of_one_row(demo)
    answer = send_chat(openai_client, body, stream=stream)
    assert answer.headers["x-paceline-pool"] == "text-mtp"
    # A report that comes between may change it: the worker measures whether drafts pay.
    assert answer.headers["x-paceline-reason"] in {reason, reason_of_one_row(demo)}
    assert answer.text == ", ".join(map(str, range(1, 21))) + "."
    assert answer.finish_reason == "stop"
    assert answer.speculation["draft_acceptance_rate"] > 0.5


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "streamed"])
def test_sampled_text_runs_in_the_vlm_lane(demo, openai_client, stream) -> None:
    answer = send_chat(openai_client, text_body(demo.model, max_tokens=64), stream=stream)
    assert answer.headers["x-paceline-pool"] == "vlm"
    assert answer.headers["x-paceline-reason"] == "non_greedy_sampling"
    assert answer.text
    assert answer.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "streamed"])
def test_the_model_names_the_colour_of_a_picture(demo, openai_client, stream) -> None:
    body = picture_body(demo.model, "green", temperature=0)
    answer = send_chat(openai_client, body, stream=stream)
    assert answer.headers["x-paceline-pool"] == "vlm"
    assert answer.headers["x-paceline-reason"] == "media"
    assert "green" in answer.text.lower()


def test_status_adds_up_to_the_sum_of_the_answers(demo: DemoGateway, openai_client: OpenAI) -> None:
    before = read_status(demo)
    bodies = [
        *(
            text_body(demo.model, question, temperature=0)
            for question in ("Hello!", "What is the capital of France?")
        ),
        *(text_body(demo.model, seed=seed, max_tokens=64) for seed in range(2)),
        picture_body(demo.model, "blue"),
    ]
    answers = [
        send_chat(openai_client, body, stream=stream) for body in bodies for stream in (False, True)
    ]
    after = read_status(demo)

    for pool in ("text-mtp", "vlm"):
        pool_answers = [answer for answer in answers if answer.headers["x-paceline-pool"] == pool]
        increase = growth(before["pools"][pool], after["pools"][pool])
        assert increase["requests"] == len(pool_answers)
        assert increase["completion_tokens"] == sum(
            answer.completion_tokens for answer in pool_answers
        )
    tokens = growth(*(status["models"][demo.model]["tokens"] for status in (before, after)))
    assert tokens["prompt"] == sum(answer.prompt_tokens for answer in answers)
    assert check_speculation(growth(before["mtp"], after["mtp"])) == sum_speculation(answers)
    assert after["decisions"]["total"] - before["decisions"]["total"] == len(answers)


def read_status(demo: DemoGateway) -> dict[str, Any]:
    status: dict[str, Any] = (
        httpx.get(f"{demo.url}/v1/status", timeout=60).raise_for_status().json()
    )
    return status


def reason_of_one_row(demo: DemoGateway) -> str:
    """Return the reason for a greedy request to an idle lane, by what its worker has measured."""
    mtp = read_status(demo)["pools"]["text-mtp"]["mtp"]
    return "eligible" if mtp["effective_draft_tokens"] else "mtp_not_paying"


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def check_speculation(increase: dict[str, Any]) -> dict[str, int]:
    assert increase["attempted"] == increase["accepted"] + increase["rejected"] + increase["errors"]
    return {name: increase[name] for name in ("drafts", "attempted", "accepted")}


def sum_speculation(answers: list[ChatResult]) -> dict[str, int]:
    speculations = [answer.speculation for answer in answers if answer.metrics]
    return {
        "drafts": sum(counts["num_spec_steps"] for counts in speculations),
        "attempted": sum(counts["num_draft_tokens"] for counts in speculations),
        "accepted": sum(counts["num_accepted_draft_tokens"] for counts in speculations),
    }
