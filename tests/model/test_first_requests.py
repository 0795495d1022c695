"""What a new user tries first: greedy, sampled, a picture; streamed and whole."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.openai_requests import ChatResult, picture_body, send_chat, text_body
from tests.support.paceline_process import UpProcess


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_greedy_text_speculates_and_says_so(
    up: UpProcess, openai_client: OpenAI, stream: bool
) -> None:
    answer = send_chat(openai_client, text_body(up.model, temperature=0), stream=stream)
    assert answer.headers["x-paceline-pool"] == "text-mtp"
    assert answer.headers["x-paceline-reason"] == "eligible"
    assert answer.text == ", ".join(map(str, range(1, 21))) + "."
    assert answer.finish_reason == "stop"
    assert answer.speculation["draft_acceptance_rate"] > 0.5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_sampled_text_takes_the_other_lane(
    up: UpProcess, openai_client: OpenAI, stream: bool
) -> None:
    answer = send_chat(openai_client, text_body(up.model, max_tokens=64), stream=stream)
    assert answer.headers["x-paceline-pool"] == "vlm"
    assert answer.headers["x-paceline-reason"] == "non_greedy_sampling"
    assert answer.text
    assert answer.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("colour", ["red", "green", "blue", "yellow"])
def test_picture_is_seen(up: UpProcess, openai_client: OpenAI, stream: bool, colour: str) -> None:
    body = picture_body(up.model, colour, temperature=0)
    answer = send_chat(openai_client, body, stream=stream)
    assert answer.headers["x-paceline-pool"] == "vlm"
    assert answer.headers["x-paceline-reason"] == "media"
    assert colour in answer.text.lower()


def test_status_adds_up_to_the_sum_of_the_answers(up: UpProcess, openai_client: OpenAI) -> None:
    before = read_status(up)
    bodies = [
        *(
            text_body(up.model, question, temperature=0)
            for question in ("Hello!", "What is the capital of France?")
        ),
        *(text_body(up.model, seed=seed, max_tokens=64) for seed in range(2)),
        picture_body(up.model, "blue"),
    ]
    answers = [
        send_chat(openai_client, body, stream=stream) for body in bodies for stream in (False, True)
    ]
    after = read_status(up)

    for pool in ("text-mtp", "vlm"):
        here = [answer for answer in answers if answer.headers["x-paceline-pool"] == pool]
        grown = growth(before["pools"][pool], after["pools"][pool])
        assert grown["requests"] == len(here)
        assert grown["prompt_tokens"] == sum(answer.prompt_tokens for answer in here)
        assert grown["completion_tokens"] == sum(answer.completion_tokens for answer in here)
    assert speculated(growth(before["mtp"], after["mtp"])) == summed(answers)
    assert after["decisions"]["total"] - before["decisions"]["total"] == len(answers)


def test_draft_counts_explain_every_token(up: UpProcess, openai_client: OpenAI) -> None:
    answer = send_chat(openai_client, text_body(up.model, temperature=0))
    counts = answer.speculation
    histogram = counts["acceptance_histogram"]
    assert sum(histogram) == counts["num_spec_steps"]
    accepted = sum(length * steps for length, steps in enumerate(histogram))
    assert accepted == counts["num_accepted_draft_tokens"]
    assert counts["mean_acceptance_length"] == pytest.approx(1 + accepted / sum(histogram))
    # Every step brings what it accepted and one more, of which the last may bring more than the
    # answer had room for; the first token comes from the prompt, others may come undrafted.
    brought = 1 + accepted + counts["num_spec_steps"]
    assert brought <= answer.completion_tokens + counts["num_spec_tokens"]


def read_status(line: UpProcess) -> dict[str, Any]:
    state: dict[str, Any] = httpx.get(f"{line.url}/v1/status").raise_for_status().json()
    return state


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def speculated(grown: dict[str, Any]) -> dict[str, int]:
    assert grown["attempted"] == grown["accepted"] + grown["rejected"] + grown["errors"]
    return {name: grown[name] for name in ("drafts", "attempted", "accepted")}


def summed(answers: list[ChatResult]) -> dict[str, int]:
    counted = [answer.speculation for answer in answers if answer.metrics]
    return {
        "drafts": sum(counts["num_spec_steps"] for counts in counted),
        "attempted": sum(counts["num_draft_tokens"] for counts in counted),
        "accepted": sum(counts["num_accepted_draft_tokens"] for counts in counted),
    }
