"""Large entries of chunks, cut into small ones that clients add up to the same."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from workers.engine.types import Delta, Finished, FinishReason, ScoredToken, TokenLogprob, Usage
from workers.server.openai_format import ChatChoice, CompletionChoice, split_entry
from workers.server.response import EVENT_LIMIT_BYTES, _encode_chunk

USAGE = Usage(prompt_tokens=1, completion_tokens=1)


def tokens(texts: list[str], top: int = 2) -> tuple[TokenLogprob, ...]:
    offsets = [sum(map(len, texts[:at])) for at in range(len(texts))]
    return tuple(
        TokenLogprob(
            token_id=1,
            raw=text.encode(),
            logprob=-0.5,
            top=tuple(ScoredToken(token_id=at, raw=b"t%d" % at, logprob=-1.0) for at in range(top)),
            offset_chars=offset,
        )
        for text, offset in zip(texts, offsets, strict=True)
    )


def chunk_of(entry: dict[str, Any]) -> ChatCompletionChunk:
    shown = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
    plain = {name: value for name, value in entry.items() if name != "token_sources"}
    return ChatCompletionChunk.model_validate({**shown, "choices": [plain]})


def summed(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the accumulator of OpenAI's package makes of a stream."""
    state: Any = ChatCompletionStreamState()
    for entry in entries:
        state.handle_chunk(chunk_of(entry))
    return state.current_completion_snapshot.choices[0].model_dump()


@given(
    texts=st.lists(st.text(max_size=4), max_size=12),
    count=st.integers(1, 9),
    kind=st.sampled_from(["content", "reasoning_content", "call", "arguments"]),
)
def test_the_parts_of_a_chunk_of_a_chat_add_up_to_it(texts, count, kind) -> None:
    text = "".join(texts)
    delta: dict[str, Any] = {kind: text}
    if kind == "reasoning_content":
        delta["reasoning"] = text
    if kind in ("call", "arguments"):
        shown = {"id": "1", "type": "function"} if kind == "call" else {}
        name = {"name": "look"} if kind == "call" else {}
        call = {"index": 0, **shown, "function": {**name, "arguments": text}}
        delta = {"tool_calls": [call]}
    logprobs = [
        {"token": one, "logprob": -1.0, "bytes": [*one.encode()], "top_logprobs": []}
        for one in texts
    ]
    entry = {
        "index": 0,
        "delta": delta,
        "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        "finish_reason": "stop",
        "stop_reason": 7,
        "token_sources": [{"text": one, "source": "model"} for one in texts],
    }
    begin: dict[str, Any] = {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}
    first = {"index": 0, "id": "1", "type": "function"}
    if kind == "arguments":
        named = {**first, "function": {"name": "look", "arguments": ""}}
        begin["delta"]["tool_calls"] = [named]
    parts = split_entry(entry, count)
    assert len(parts) <= count
    assert summed([begin, *parts]) == summed([begin, entry])
    assert [one for part in parts for one in part["token_sources"]] == entry["token_sources"]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["stop_reason"] == 7


def test_c23_the_prompt_of_an_echo_comes_in_events_of_a_bounded_size() -> None:
    texts = ["wörd \x00"] * 3000
    choice = CompletionChoice(0, echo="".join(texts), top_logprobs=20, token_sources=False)
    (entry,) = choice.echo(tokens(texts, top=20))
    events = _encode_chunk({"choices": [entry], "usage": {"prompt_tokens": 3000}})
    assert len(events) > 1
    assert max(map(len, events)) <= EVENT_LIMIT_BYTES
    chunks = [json.loads(event[6:]) for event in events]
    assert all(chunk["usage"] == {"prompt_tokens": 3000} for chunk in chunks)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == entry["text"]
    for name, listed in entry["logprobs"].items():
        assert [one for part in parts for one in part["logprobs"][name]] == json.loads(
            json.dumps(listed)
        )


def test_c23_an_end_with_the_log_probabilities_of_a_held_back_text_is_cut() -> None:
    choice = ChatChoice(0, splitter=None, logprobs=True, token_sources=True)
    texts = ["word "] * 5000
    choice.add(Delta(text="", logprobs=tokens(texts, top=20), usage=USAGE))
    entries = choice.finish(Finished(reason=FinishReason.STOP, usage=USAGE))
    events = [event for entry in entries for event in _encode_chunk({"choices": [entry]})]
    assert max(map(len, events)) <= EVENT_LIMIT_BYTES
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    assert sum(len(one["logprobs"]["content"]) for one in choices if one["logprobs"]) == 5000
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["stop"]
