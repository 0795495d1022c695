"""The first requests of a new user: greedy, sampled and with a picture; streamed and not."""

import httpx
import pytest
from openai import OpenAI

from tests.support.openai_requests import picture_body, send_chat, text_body
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
def test_sampled_text_and_pictures_run_in_the_vlm_lane(demo, openai_client, stream) -> None:
    for body, reason, text in (
        (text_body(demo.model, max_tokens=64), "non_greedy_sampling", ""),
        (picture_body(demo.model, "green", temperature=0), "media", "green"),
    ):
        answer = send_chat(openai_client, body, stream=stream)
        assert answer.headers["x-paceline-pool"] == "vlm"
        assert answer.headers["x-paceline-reason"] == reason
        assert answer.text
        assert text in answer.text.lower()
        assert answer.completion_tokens > 0


def reason_of_one_row(demo: DemoGateway) -> str:
    """Return the reason for a greedy request to an idle lane, by what its worker has measured."""
    mtp = httpx.get(f"{demo.url}/v1/status", timeout=60).json()["pools"]["text-mtp"]["mtp"]
    return "eligible" if mtp["effective_draft_tokens"] else "mtp_not_paying"
