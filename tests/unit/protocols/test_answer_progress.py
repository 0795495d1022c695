"""Streams whose worker tells the tokens: cut at any byte, and continued by another worker."""

import json
from collections.abc import Iterator, Sequence

import pytest

from gateway.protocols.event_stream import AnswerProgress, StreamScanner
from gateway.protocols.openai import CHAT, OpenAIStreamEncoder
from paceline.protocol import ANSWER_FIELD, DraftSource
from tests.support.request_profiles import GREEDY
from tests.support.scripted_worker import DONE, chunk, usage_chunk
from workers.engine.types import TokenStep
from workers.server.answer_progress import AnswerProgress as WorkerProgress
from workers.server.answer_progress import GivenStream, read_given
from workers.server.errors import BadRequest

HEAD = chunk({"role": "assistant", "content": ""})
HEADS = (DraftSource.HEAD, DraftSource.LOOKUP, DraftSource.FORCED)
STEPS = (
    (TokenStep((5,)),),
    (TokenStep((12, 55), HEADS[:2], 1), TokenStep((), HEADS)),
    (TokenStep((7,), HEADS[:2], 0), TokenStep((9,))),
    (TokenStep((1, 2), HEADS, 2),),
)
"""Of four deltas; the last step ends the answer within its draft."""
TEXTS: tuple[tuple[bytes, ...], ...] = (
    (chunk({"content": "one"}),),
    (chunk({"reasoning": "why"}), chunk({"content": " two"})),
    (chunk({"content": ' "usage": 3'}),),
    (chunk({"content": " größer"}),),
)


def pieces(given: GivenStream | None = None) -> Iterator[bytes]:
    """Yield what a worker sends in one go, from where the client has the answer."""
    progress = WorkerProgress(None if given else 1764000000)
    answer = given.answers[0] if given else None
    begin = len(answer.steps) if answer else 0
    if given is None:
        yield b"".join(progress.mark([HEAD], 0))
    told = 0
    for steps, texts in zip(STEPS, TEXTS, strict=True):
        told += len(steps)
        if told > begin:
            assert told - len(steps) >= begin, "a delta is given out whole or not at all"
            progress.add(0, steps)
            yield b"".join(progress.mark(texts, 0))
            yield b": keepalive\n\n"
    if answer is None or not answer.finished:
        progress.add(0, (), ended=True)
        yield b"".join(progress.mark([chunk({"content": "!"}), chunk({}, "stop")], 0))
    yield usage_chunk()
    yield DONE


def relay(
    sent: bytes, encoder: OpenAIStreamEncoder, progress: AnswerProgress
) -> tuple[bytes, bool]:
    """Scan what has come of a stream; return what the client gets, and whether it is complete."""
    scanner = StreamScanner(encoder, CHAT.keep_alive, progress=progress)
    scanner.state.finished = progress.finished
    passed = scanner.feed(sent)
    assert not scanner.state.broken
    progress.finished |= scanner.state.finished
    return passed, scanner.state.complete


def events_of(received: bytes) -> list[bytes]:
    return [one for one in received.split(b"\n\n") if one and not one.startswith(b":")]


def encoder(*, include_metrics: bool = True) -> OpenAIStreamEncoder:
    profile = GREEDY._replace(include_usage=True)
    return OpenAIStreamEncoder(profile, include_metrics=include_metrics)


WHOLE = b"".join(pieces())
EVENTS = [HEAD, *(event for texts in TEXTS for event in texts), chunk({"content": "!"})]
EVENTS += [chunk({}, "stop"), usage_chunk(), DONE]


@pytest.mark.parametrize("cuts", [1, 2])
def test_a_stream_that_is_cut_at_any_byte_goes_on_with_the_next_token(cuts: int) -> None:
    expected = [event.removesuffix(b"\n\n") for event in EVENTS]
    positions: list[tuple[int, ...]] = [(at,) for at in range(len(WHOLE) + 1)]
    if cuts == 2:
        positions = [(at, at // 3) for at in range(0, len(WHOLE) + 1, 7)]
    for position in positions:
        one, progress = encoder(), AnswerProgress()
        received, complete = relay(WHOLE[: position[0]], one, progress)
        for further in (*position[1:], None):
            if complete or progress.ended:
                break
            given = read_given(progress.encode(), 1) if progress.lines else None
            rest = b"".join(pieces(given))
            more, complete = relay(rest[:further], one, progress)
            received += more
        if not complete:
            assert progress.ended
            received += one.done()
        assert events_of(received) == expected, position
        assert b": t" not in received
        assert b": g" not in received


def test_the_lines_of_any_split_are_the_same_and_the_worker_reads_what_it_has_told() -> None:
    one, progress = encoder(), AnswerProgress()
    scanner = StreamScanner(one, CHAT.keep_alive, progress=progress)
    received = b"".join(scanner.feed(WHOLE[at : at + 1]) for at in range(len(WHOLE)))
    assert events_of(received) == [event.removesuffix(b"\n\n") for event in EVENTS]
    assert progress.resumable
    assert progress.encode() == "0 @1764000000;0 5;0 12+55/hl /hlf;0 7/hl 9;0 1+2/hlf,2;0 ."
    given = read_given(progress.encode(), 1)
    assert given.created_s == 1764000000
    (answer,) = given.answers
    assert answer.steps == tuple(step for steps in STEPS for step in steps)
    assert answer.finished


@pytest.mark.parametrize("further", [b"", b": keepalive\n\n", chunk({"content": "no line"})])
def test_events_that_come_together_are_passed_on_as_one_by_one(further: bytes) -> None:
    told, texts = WorkerProgress(3), [chunk({"content": f"word {n}"}) for n in range(9)]
    sent = b""
    for number, text in enumerate(texts):
        told.add(0, [TokenStep((number,))])
        sent += b"".join(told.mark([text], 0)) + (further if number == 5 else b"")
    results = []
    for size in (1, len(sent)):
        progress = AnswerProgress()
        scanner = StreamScanner(encoder(), CHAT.keep_alive, progress=progress)
        received = b"".join(scanner.feed(sent[at : at + size]) for at in range(0, len(sent), size))
        results.append((events_of(received)[:7], progress.encode(), progress.resumable))
    assert results[0] == results[1]
    assert results[0][2] is not further.startswith(b"data:")


def test_each_choice_is_told_apart() -> None:
    progress = WorkerProgress(3)
    progress.add(1, [TokenStep((8,))])
    first = b"".join(progress.mark([chunk({"content": "b"})], 1))
    progress.add(0, [TokenStep((4,))])
    idle = b"".join(progress.mark([chunk({})], 0, whole=False))
    second = b"".join(progress.mark([chunk({"content": "a"})], 0))
    read = AnswerProgress()
    relay(first + idle + second, encoder(), read)
    assert read.encode() == "1 @3 8;0;0 4"
    given = read_given(read.encode(), 2)
    assert [answer.steps for answer in given.answers] == [(TokenStep((4,)),), (TokenStep((8,)),)]


@pytest.mark.parametrize(
    "events", [[chunk({"content": "told"})], [HEAD, chunk({"content": "plain"})]]
)
def test_a_stream_with_an_event_without_a_line_does_not_go_on(events: Sequence[bytes]) -> None:
    progress = AnswerProgress()
    sent = b"".join(WorkerProgress(3).mark([HEAD], 0)) + b"".join(events)
    scanner = StreamScanner(encoder(), CHAT.keep_alive, progress=progress)
    received = scanner.feed(sent)
    assert events_of(received)[-1] == events[-1].removesuffix(b"\n\n")
    assert not progress.resumable
    text = chunk({"content": "as before"})
    assert scanner.feed(text) == text


def test_half_a_group_is_not_passed_on_and_one_without_end_breaks_the_stream() -> None:
    scanner = StreamScanner(encoder(), CHAT.keep_alive, progress=AnswerProgress(), limit_bytes=4096)
    scanner.feed(b"".join(WorkerProgress(3).mark([HEAD], 0)))
    group = WorkerProgress().mark([chunk({"content": "a"}), chunk({"content": "b"})], 0)
    assert scanner.feed(group[0]) == b""
    assert not scanner.quiet
    assert scanner.feed(group[1]) == chunk({"content": "a"}) + chunk({"content": "b"})
    for _ in range(100):
        scanner.feed(b": g\n" + chunk({"content": "x" * 100}))
    assert scanner.state.broken


@pytest.mark.parametrize(
    "field",
    [
        *(None, 3, [], "", "0", "0 @", "0 @1 x", "1 @1", "-1 @1", "0 @1 1/hh,2", "0 @1 1++2"),
        *("0 @1 1/h,2", "0 @1 1/x", "0 @1 . 5", "0 5", '0 @1 "', "0 @1 1\n2", "x @1"),
        "0 @1 " + "9" * 20,
    ],
)
def test_a_field_that_no_worker_has_told_is_refused(field: object) -> None:
    with pytest.raises(BadRequest) as refused:
        read_given(field, 1)
    assert refused.value.param == ANSWER_FIELD


@pytest.mark.parametrize("include_metrics", [True, False])
def test_metrics_tell_the_failovers(include_metrics: bool) -> None:
    one = encoder(include_metrics=include_metrics)
    one.failovers = 2
    encoded = one.event(usage_chunk(), json.loads(usage_chunk().removeprefix(b"data: ")))
    metrics = json.loads(encoded.removeprefix(b"data: ")).get("metrics", {})
    assert metrics.get("failovers") == (2 if include_metrics else None)
