# /// script
# dependencies = ["langchain-openai==1.7.3", "langchain-anthropic==1.7.10"]
# [tool.paceline]
# scripted = true
# ///
"""LangChain on Responses (`langchain-openai`) and on Messages (`langchain-anthropic`)."""

from functools import partial
from typing import Any

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from bench.clients import cases
from bench.clients.schemas import City


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def responses(key: str = cases.KEY) -> Any:
    fields: Any = {"base_url": cases.API, "api_key": key, "model": cases.MODEL, "max_retries": 0}
    return ChatOpenAI(use_responses_api=True, **fields)


def messages(key: str = cases.KEY) -> Any:
    fields: Any = {"base_url": cases.URL, "api_key": key, "model": cases.MODEL, "max_retries": 0}
    return ChatAnthropic(max_tokens=300, **fields)


def stream(runnable: Any, question: Any) -> Any:
    """Return the sum of the chunks of a stream."""
    first, *others = runnable.stream(question)
    for chunk in others:
        first = first + chunk
    return first


def tools(chat: Any) -> str:
    runnable = chat().bind_tools([get_weather])
    texts = []
    for ask in (runnable.invoke, partial(stream, runnable)):
        message: Any = ask(cases.CALL)
        result = get_weather.invoke(message.tool_calls[0])
        answer: Any = ask([("user", cases.CALL), message, result])
        texts.append(answer.text)
    cases.check(texts == ["The tool said: sunny in Paris"] * 2, texts)
    return f"{texts[0]}; {answer.usage_metadata['input_token_details']['cache_read']} cached tokens"


def structured(chat: Any) -> str:
    runnable = chat().with_structured_output(City, method="json_schema")
    return repr(runnable.invoke("Hi"))


def ask(chat: Any, question: str, key: str) -> None:
    chat(key).invoke(question)


def close_early(chat: Any) -> None:
    chunks = chat().stream(cases.SLOWLY)
    next(chunks)
    chunks.close()


for _wire, _chat, _limit in (
    ("Responses", responses, openai.RateLimitError),
    ("Messages", messages, anthropic.RateLimitError),
):
    cases.once(f"{_wire}: a loop of tools, whole and streamed", _chat)(tools)
    cases.once(f"{_wire}: with_structured_output", _chat)(structured)
    cases.leaves(f"{_wire}: leaves a stream: the worker stops", partial(close_early, _chat))
    cases.meets_limits(
        f"{_wire}: meets a rate limit and the end of the context",
        partial(ask, _chat),
        _limit,
        ContextOverflowError,
    )

if __name__ == "__main__":
    cases.main()
