"""Answers parsed from the bytes of a stream, and the times of their pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.loadgen.client import RawResponse, read_answer
from gateway.loadgen.drafts import Drafts


def event(**frame: Any) -> bytes:
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def piece(finish_reason: str | None = None, **delta: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}])


SPECULATION = {"num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 3}
USAGE = event(
    choices=[],
    usage={"prompt_tokens": 5, "completion_tokens": 4},
    metrics={"speculative_decoding": SPECULATION | {"acceptance_histogram": [0, 1, 1]}},
)
DONE = b"data: [DONE]\n\n"
COMPLETE = (piece(role="assistant"), piece(content="a"), piece(content="b"), piece("stop"), USAGE)


def response_of(*parts: bytes, status: int = 200, problem: str = "") -> RawResponse:
    """Return a response whose first part arrives at second 1, the next at second 2, and so on."""
    arrivals = tuple(enumerate(parts, start=1))
    return RawResponse(due_s=0.5, ended_s=99, status=status, arrivals=arrivals, problem=problem)


def test_an_answer_has_the_times_tokens_and_drafts_of_its_stream() -> None:
    answer = read_answer(response_of(*COMPLETE, DONE))
    assert answer.problem == ""
    assert answer.pieces_s == (2, 3), "an event without text is no piece"
    assert (answer.ttft_s, answer.tpot_s, answer.gaps_s) == (1.5, 1 / 3, (1,))
    assert (answer.input_tokens, answer.output_tokens, answer.tokens_reported) == (5, 4, True)
    assert answer.drafts == Drafts(steps=2, drafted=4, accepted=3, per_position=(2, 1))


@given(st.data())
def test_an_event_arrives_with_its_last_byte_for_any_split(data: st.DataObject) -> None:
    stream = b"".join((*COMPLETE, DONE))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=30)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    ends = [len(b"".join(COMPLETE[: number + 1])) for number in (1, 2)]
    # An event is complete with the first of the two line feeds after it.
    times_s = tuple(1 + sum(cut < end - 1 for cut in cuts) for end in ends)
    answer = read_answer(response_of(*parts))
    assert (answer.problem, answer.pieces_s, answer.output_tokens) == ("", times_s, 4)


def test_reasoning_and_tool_calls_count_as_output_and_without_usage_each_piece_as_a_token() -> None:
    reasoning = piece(reasoning_content="hm")
    call = piece(tool_calls=[{"index": 0, "function": {"name": "f"}}])
    answer = read_answer(response_of(reasoning, call, piece("tool_calls")))
    assert answer.pieces_s == (1, 2)
    assert (answer.output_tokens, answer.tokens_reported) == (2, False)


@pytest.mark.parametrize(
    "frame", [{"choices": [None]}, {"choices": 3}, {"choices": [{"delta": "x"}]}, {"usage": [1]}]
)
def test_a_stream_of_another_shape_is_reported_as_a_problem(frame: dict[str, Any]) -> None:
    answer = read_answer(response_of(event(**frame), *COMPLETE[1:4]))
    assert answer.problem == "an event is not in OpenAI's format"


ERROR_BODY = json.dumps({"error": {"message": "No such model."}}).encode()
BROKEN = event(error={"message": "The worker was lost."})


@pytest.mark.parametrize(
    ("expected", "response"),
    [
        ("404: No such model.", response_of(ERROR_BODY, status=404)),
        ("502: without a reason", response_of(b"<html>", status=502)),
        ("broke off: The worker was lost.", response_of(*COMPLETE[:2], BROKEN)),
        ("ended without a finish reason", response_of(*COMPLETE[:3])),
        ("nothing came in time", response_of(status=0, problem="nothing came in time")),
        ("the connection failed", response_of(*COMPLETE, problem="the connection failed")),
    ],
)
def test_an_incomplete_answer_reports_its_problem(expected: str, response: RawResponse) -> None:
    answer = read_answer(response)
    assert (answer.problem, answer.ttft_s) == (expected, None)
