"""Text completions of a real worker, read by the unmodified `openai` package."""

from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from openai.types import Completion
from tokenizers import Tokenizer

from tests.support.maker_types import read_whole_and_streamed
from tests.support.scripted_engine import ScriptedEngine, text_events, worker_client
from tests.support.worker_process import SUPPRESS_END_TOKENS
from workers.demo import CHECKPOINT
from workers.engine.types import Delta, ScoredToken, TokenLogprob

Complete = Callable[..., Awaitable[Any]]


@pytest.fixture
def complete(worker_client: openai.AsyncOpenAI) -> Complete:
    """Return a function that requests a completion, of `Once` unless told."""

    async def ask(**fields: Any) -> Any:
        return await worker_client.completions.create(
            **{"model": "demo", "prompt": "Once", **fields}
        )

    return ask


@pytest.fixture
def stream(complete: Complete) -> Complete:
    async def ask(**fields: Any) -> list[Completion]:
        return [chunk async for chunk in await complete(stream=True, **fields)]

    return ask


def texts_of(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


def text_of(chunks: list[Completion], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.text for choice in choices)


async def test_a_completion_defaults_to_sixteen_tokens_and_speculates_if_greedy(complete) -> None:
    answer = await complete(temperature=0, extra_body={"draft_tokens": 2})
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.completion_tokens <= 16
    assert "speculative_decoding" in answer.model_extra["metrics"]


@pytest.mark.parametrize("fields", [{"logprobs": 2}, {"n": 2}, {"stop": ["e"], "echo": True}])
async def test_completions_and_chunks_are_of_openais_own_type(worker_url, fields) -> None:
    body = {"model": "demo", "prompt": "Once upon a time", **fields}
    completion, chunks = await read_whole_and_streamed(
        f"{worker_url}/v1/completions", body, Completion, Completion
    )
    assert len(completion.choices) == fields.get("n", 1)
    assert chunks[-1].usage is not None


async def test_a_completion_stream_has_the_text_and_usage_of_a_complete_answer(
    complete: Complete, stream: Complete
) -> None:
    fields: Any = {"seed": 5, "max_tokens": 12}
    whole = await complete(**fields)
    chunks = await stream(stream_options={"include_usage": True}, **fields)
    assert [text_of(chunks)] == texts_of(whole)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_echo_prepends_the_prompt(complete: Complete, stream: Complete) -> None:
    fields: Any = {"temperature": 0, "max_tokens": 4}
    (plain,) = texts_of(await complete(**fields))
    assert texts_of(await complete(echo=True, **fields)) == ["Once" + plain]
    assert text_of(await stream(echo=True, **fields)) == "Once" + plain


async def test_many_prompts_get_the_answers_that_each_gets_alone(complete, stream) -> None:
    """Choices come prompt by prompt, and a prompt counts once however many answers it has."""
    fields: Any = {"seed": 3, "max_tokens": 5, "n": 2}
    prompts = ["Once upon", "Two and two"]
    alone = [await complete(prompt=one, **fields) for one in prompts]
    together = await complete(prompt=prompts, **fields)
    chunks = await stream(prompt=prompts, **fields)

    texts = [text for one in alone for text in texts_of(one)]
    assert texts_of(together) == texts == [text_of(chunks, index) for index in range(4)]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    for name in ("prompt_tokens", "completion_tokens"):
        assert getattr(together.usage, name) == sum(getattr(one.usage, name) for one in alone)


async def test_the_log_probabilities_of_a_prompt_are_those_that_its_tokens_had_as_an_answer(
    complete: Complete, stream: Complete
) -> None:
    """As `lm-eval` asks for them: a prompt in tokens, `echo`, `logprobs`, and no answer."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    prompt = tokenizer.encode("Once").ids
    written = (await complete(prompt=prompt, temperature=0, logprobs=1)).choices[0].logprobs
    ids = [tokenizer.token_to_id(one) or tokenizer.encode(one).ids[0] for one in written.tokens]
    tokens = [*prompt, *ids]

    scoring: Any = {"prompt": tokens, "temperature": 0, "logprobs": 1, "echo": True}
    scored = await complete(max_tokens=0, **scoring)
    chunks = await stream(max_tokens=0, **scoring)

    (choice,) = scored.choices
    logprobs = choice.logprobs
    assert (choice.text, choice.finish_reason) == (tokenizer.decode(tokens, False), "length")
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (len(tokens), 0)
    values, tops = logprobs.token_logprobs, logprobs.top_logprobs
    assert len(values) == len(tops) == len(tokens)
    assert (values[0], tops[0]) == (None, None)
    assert values[len(prompt) :] == pytest.approx(written.token_logprobs, abs=1e-3)
    assert all(max(top.values()) >= value for top, value in zip(tops[1:], values[1:], strict=True))
    places = zip(logprobs.text_offset, logprobs.tokens, strict=True)
    assert all(choice.text.startswith(token, at) for at, token in places)
    assert text_of(chunks) == choice.text
    assert chunks[0].choices[0].logprobs == logprobs


async def test_a_token_outside_the_vocabulary_is_a_400_that_names_the_prompt(complete) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(prompt=[1, 10_000_000])
    assert refused.value.param == "prompt"


async def test_logprobs_have_the_completions_shape_and_equal_offsets_in_a_stream(
    complete: Complete, stream: Complete
) -> None:
    fields: Any = {"temperature": 0, "max_tokens": 6, "logit_bias": SUPPRESS_END_TOKENS}
    whole = (await complete(logprobs=2, **fields)).choices[0].logprobs
    chunks = await stream(logprobs=2, **fields)
    pieces: Any = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert len(whole.tokens) == 6
    assert [len(top) for top in whole.top_logprobs] == [2] * 6
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert [at for piece in pieces for at in piece.text_offset] == whole.text_offset


async def test_alternatives_that_are_incomplete_characters_have_distinct_names() -> None:
    likeliest = tuple(
        ScoredToken(token_id=byte, raw=bytes([byte]), logprob=-float(at))
        for at, byte in enumerate((0xF0, 0xE2))
    )
    token = TokenLogprob(token_id=0xF0, raw=b"\xf0", logprob=0.0, top=likeliest)
    engine = ScriptedEngine([Delta(text="", logprobs=(token,)), *text_events("\U0001f642")])
    body = {"model": "scripted", "prompt": "x", "logprobs": 2}
    async with worker_client(engine) as client:
        response = await client.post("/v1/completions", json=body)
    (choice,) = response.json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\\xf0": 0.0, "\\xe2": -1.0}]
