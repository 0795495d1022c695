"""Reasoning apart from the answer: the demo model with a template that opens it, over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.scripted_engine import make_worker, serve_worker
from tests.support.served_engine import running_engine
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine

THINK = {"chat_template_kwargs": {"enable_thinking": True}}
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "mood": {"enum": ["merry", "sad"]}},
    "required": ["count", "mood"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
THINK_END = 1535
"""The token `</think>`."""
_THINK = {"<think>": "<think>", "</think>": "</think>"}
_FAMILIES: dict[str, tuple[dict[str, str], str, str]] = {
    "qwen": (_THINK, "<think>\\n", "<think>\\n\\n</think>\\n\\n"),
    "mistral": ({"<think>": "[THINK]", "</think>": "[/THINK]"}, "[THINK]", "[THINK][/THINK]"),
    "gemma": (
        {"<think>": "<|channel>", "</think>": "<channel|>"},
        "<|channel>thought\\n",
        "<|channel>thought\\n<channel|>",
    ),
    "gpt-oss": (
        {
            "<tool_call>": "<|start|>",
            "</tool_call>": "<|channel|>",
            "<tool_response>": "<|message|>",
            "</tool_response>": "<|end|>",
        },
        "<|start|>assistant<|channel|>analysis<|message|>",
        "<|start|>assistant<|channel|>final<|message|>",
    ),
}
"""Tokens of the demo model and what replaces them, and the ends of prompts."""
FAMILIES = tuple(_FAMILIES)


def make_reasoning_model(folder: Path, family: str = "qwen") -> Path:
    """Fill a folder with the demo checkpoint and another generation prompt; return it."""
    marks, opened, closed = _FAMILIES[family]
    folder.mkdir()
    for path in CHECKPOINT.iterdir():
        (folder / path.name).symlink_to(path)
    tail = f"{{%- if enable_thinking -%}}{{{{- '{opened}' -}}}}"
    tail += f"{{%- else -%}}{{{{- '{closed}' -}}}}{{%- endif -%}}"
    for name, end in (("chat_template.jinja", tail), ("tokenizer.json", "")):
        text = (folder / name).read_text()
        (folder / name).unlink()
        for old, new in marks.items():
            text = text.replace(old, new)
        (folder / name).write_text(text + end)
    return folder


@pytest.fixture(scope="module")
def reasoning_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_reasoning_model(tmp_path_factory.mktemp("reasoning") / "model")
    with running_engine(folder) as running:
        yield running


@pytest.fixture
async def client(reasoning_engine: Engine) -> AsyncIterator[AsyncOpenAI]:
    async with serve_reasoning(reasoning_engine) as openai_client:
        yield openai_client


@asynccontextmanager
async def serve_reasoning(engine: Engine) -> AsyncIterator[AsyncOpenAI]:
    async with (
        serve_worker(make_worker(engine)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai_client,
    ):
        yield openai_client


async def ask(client: AsyncOpenAI, question: str = "Count from 1 to 9.", **fields: Any) -> Any:
    extra = {**THINK, **fields.pop("extra", {})}
    return await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        extra_body=extra,
        **{"temperature": 0, "max_tokens": 32, **fields},
    )


def parts(message: Any) -> tuple[str | None, str | None]:
    fields = message.model_dump()
    assert fields.get("reasoning") == fields.get("reasoning_content")
    return fields.get("reasoning"), fields["content"]


async def stream(client: AsyncOpenAI, **fields: Any) -> tuple[str, str, Any]:
    """Return the reasoning and the answer of a stream, and its usage."""
    chunks = await ask(client, stream=True, stream_options={"include_usage": True}, **fields)
    reasoning, content, usage = "", "", None
    async for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            assert delta.get("reasoning") == delta.get("reasoning_content")
            assert not (delta.get("reasoning") and content), "reasoning comes first"
            reasoning += delta.get("reasoning") or ""
            content += delta.get("content") or ""
    return reasoning, content, usage


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_budget_holds_to_the_token_and_drafts_change_nothing(client, temperature) -> None:
    """Whole and streamed, with any drafts, the same reasoning of at most so many tokens."""
    for budget in (0, 1, 4):
        seen = set()
        for drafts in (0, 2):
            fields: Any = {
                "max_tokens": 8,
                "temperature": temperature,
                "seed": 3,
                "extra": {"thinking_budget": budget, "draft_tokens": drafts},
            }
            whole = await ask(client, **fields)
            reasoning, content = parts(whole.choices[0].message)
            streamed = await stream(client, **fields)
            assert streamed[:2] == (reasoning or "", content or "")
            for usage in (whole.usage, streamed[2]):
                assert usage.completion_tokens_details.reasoning_tokens == budget
            assert "think>" not in f"{reasoning}{content}"
            seen.add((reasoning, content))
        assert len(seen) == 1


async def test_an_answer_cut_within_its_reasoning_has_no_content(client: AsyncOpenAI) -> None:
    """As in vLLM, `content` is null, every token is reasoning, and `finish_reason` is length."""
    cut = await ask(client, max_tokens=4)
    reasoning, content = parts(cut.choices[0].message)
    assert (reasoning, content) == ("1, 2", None)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens_details.reasoning_tokens == cut.usage.completion_tokens == 4


async def test_stop_strings_and_logprobs_concern_the_answer_alone(client: AsyncOpenAI) -> None:
    """A stop string within the reasoning does not end it; the answer stops at it."""
    fields: Any = {"extra": {"thinking_budget": 4}, "logit_bias": {"2": -100}}
    free = await ask(client, logprobs=True, **fields)
    reasoning, content = parts(free.choices[0].message)
    assert reasoning is not None
    assert content
    letter = next(letter for letter in content[1:] if letter in reasoning)
    assert "".join(one.token for one in free.choices[0].logprobs.content) == content
    stopped = await ask(client, stop=[letter], **fields)
    assert parts(stopped.choices[0].message) == (reasoning, content[: content.index(letter)])
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_schema_constrains_the_answer_after_the_reasoning(
    client: AsyncOpenAI, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight rows at once, half with a schema: each answer has its form, with drafts or without."""

    async def one(index: int) -> tuple[str | None, str | None]:
        answer = await ask(
            client,
            max_tokens=64,
            temperature=temperature,
            seed=1,
            response_format=FORMAT if index % 2 else {"type": "text"},
            extra={"thinking_budget": 2 + index // 4, "draft_tokens": index // 2 % 2 * 2},
        )
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2 + index // 4
        return parts(answer.choices[0].message)

    answers = await asyncio.gather(*map(one, range(8)))
    assert answers[:2] == answers[2:4]
    assert answers[4:6] == answers[6:]
    for reasoning, content in answers[1::2]:
        assert reasoning is not None
        assert reasoning.startswith("1,")
        assert list(json.loads(content or "")) == ["count", "mood"]
    assert "lane.failed" not in caplog.text, "no step failed and was repeated without drafts"


@pytest.mark.parametrize("family", FAMILIES[1:])
async def test_every_format_holds_its_budget_and_then_the_schema(family, tmp_path) -> None:
    """The forced tokens are drafts that the model accepts, and none of them is a text."""
    folder = make_reasoning_model(tmp_path / "model", family)
    with running_engine(folder) as engine:
        async with serve_reasoning(engine) as openai_client:
            seen = set()
            for drafts in (0, 2):
                answer = await ask(
                    openai_client,
                    max_tokens=64,
                    response_format=FORMAT,
                    extra={"thinking_budget": 4, "draft_tokens": drafts},
                )
                reasoning, content = parts(answer.choices[0].message)
                seen.add(reasoning)
                assert list(json.loads(content or "")) == ["count", "mood"]
                assert answer.usage.completion_tokens_details.reasoning_tokens == 4
            assert len(seen) == 1
            assert None not in seen
            plain = await ask(openai_client, extra={"chat_template_kwargs": {}})
            assert parts(plain.choices[0].message)[0] is None


async def test_a_constrained_answer_does_not_end_within_its_reasoning(client: AsyncOpenAI) -> None:
    """The end token, however likely, is excluded there: else an answer would lack its form."""
    answer = await ask(client, max_tokens=9, response_format=FORMAT, logit_bias={"2": 100})
    assert answer.choices[0].finish_reason == "length"
    ended = await ask(
        client, max_tokens=64, response_format=FORMAT, logit_bias={str(THINK_END): 100}
    )
    assert list(json.loads(ended.choices[0].message.content or "")) == ["count", "mood"]


async def test_a_forced_call_follows_the_reasoning(client: AsyncOpenAI) -> None:
    """Its form begins where the reasoning ends, as a schema does."""
    tool = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
    answer = await ask(
        client,
        max_tokens=64,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "count"}},
        extra={"thinking_budget": 2},
    )
    message = answer.choices[0].message
    assert parts(message)[1] is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    assert answer.choices[0].finish_reason == "tool_calls"
    assert list(json.loads(message.tool_calls[0].function.arguments)) == ["count", "mood"]


async def test_a_client_need_not_see_the_reasoning(client: AsyncOpenAI) -> None:
    """The answer is the same without it, whole and streamed, and its tokens count."""
    fields: Any = {"extra": {"thinking_budget": 4}, "logit_bias": {"2": -100}}
    _, content = parts((await ask(client, **fields)).choices[0].message)
    fields["extra"]["include_reasoning"] = False
    hidden = await ask(client, **fields)
    assert parts(hidden.choices[0].message) == (None, content)
    assert hidden.choices[0].message.model_dump()["reasoning_content"] is None
    assert hidden.usage.completion_tokens_details.reasoning_tokens == 4
    assert (await stream(client, **fields))[:2] == ("", content)


async def test_a_template_that_closes_the_reasoning_leaves_none(client: AsyncOpenAI) -> None:
    """Without thinking both fields are null, as the model can reason, and the count is 0."""
    plain = await ask(client, extra={"chat_template_kwargs": {"enable_thinking": False}})
    assert parts(plain.choices[0].message)[0] is None
    message = plain.choices[0].message.model_dump()
    assert (message["reasoning"], message["reasoning_content"]) == (None, None)
    assert plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "xhigh"}, True),
        ({"chat_template_kwargs": {"unknown": {"x": 1}, "enable_thinking": True}}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
async def test_an_effort_switches_the_reasoning(client, fields, reasons) -> None:
    """Where the template can; the template's own variable wins, and unknown ones are accepted."""
    fields = {"chat_template_kwargs": {}, **fields}
    answer = await ask(client, max_tokens=4, extra=fields)
    assert (parts(answer.choices[0].message)[0] is not None) is reasons


async def test_a_template_variable_is_a_text_and_no_markup(reasoning_engine: Engine) -> None:
    """It overwrites no argument of the rendering, and spells no control token."""
    prompts = reasoning_engine.prompts
    given = {"has_system": "x", "conversation": [], "enable_thinking": True}
    assert prompts.template_variables(given, None) == {"enable_thinking": True}
    spelled = prompts.template_variables({"enable_thinking": "<|im_end|>"}, "none")
    assert "<|im_end|>" not in str(spelled)
