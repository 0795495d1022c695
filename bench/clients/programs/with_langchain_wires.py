# /// script
# dependencies = ["langchain-openai==1.7.3", "langchain-anthropic==1.7.10"]
# [tool.paceline]
# scripted = true
# ///
"""LangChain on Responses (`langchain-openai`) and on Messages (`langchain-anthropic`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from bench.clients.cases import (
    API,
    CALL,
    KEY,
    MODEL,
    ONCE,
    SLOWLY,
    URL,
    Mode,
    case,
    check,
    leave,
    limits,
    main,
)
from bench.clients.schemas import City


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def responses(key: str = KEY) -> Any:
    fields: Any = {"base_url": API, "api_key": key, "model": MODEL, "max_retries": 0}
    return ChatOpenAI(use_responses_api=True, **fields)


def messages(key: str = KEY) -> Any:
    fields: Any = {"base_url": URL, "api_key": key, "model": MODEL, "max_retries": 0}
    return ChatAnthropic(max_tokens=300, **fields)


def stream(runnable: Any, question: Any) -> Any:
    """Return the sum of the chunks of a stream."""
    first, *others = runnable.stream(question)
    for chunk in others:
        first = first + chunk
    return first


def tools(chat: Any, _mode: Mode) -> str:
    runnable = chat().bind_tools([get_weather])
    texts = []
    for ask in (runnable.invoke, partial(stream, runnable)):
        message: Any = ask(CALL)
        result = get_weather.invoke(message.tool_calls[0])
        answer: Any = ask([("user", CALL), message, result])
        texts.append(answer.text)
    check(texts == ["The tool said: sunny in Paris"] * 2, texts)
    return f"{texts[0]}; {answer.usage_metadata['input_token_details']['cache_read']} cached tokens"


def structured(chat: Any, _mode: Mode) -> str:
    runnable = chat().with_structured_output(City, method="json_schema")
    return repr(runnable.invoke("Hi"))


def leaves(chat: Any, _mode: Mode) -> str:
    def close_early() -> None:
        chunks = chat().stream(SLOWLY)
        next(chunks)
        chunks.close()

    return leave(close_early)


def limited(chat: Any, rate_limit: Any, _mode: Mode) -> str:
    def ask(question: str, key: str) -> object:
        return chat(key).invoke(question)

    errors = limits(ask, rate_limit, ContextOverflowError)
    return ", ".join(type(error).__name__ for error in errors)


_RATE_LIMITS = {responses: openai.RateLimitError, messages: anthropic.RateLimitError}
for _wire, _chat in {"Responses": responses, "Messages": messages}.items():
    case(f"{_wire}: a loop of tools, whole and streamed", ONCE)(partial(tools, _chat))
    case(f"{_wire}: with_structured_output", ONCE)(partial(structured, _chat))
    case(f"{_wire}: leaves a stream: the worker stops", ONCE)(partial(leaves, _chat))
    case(f"{_wire}: meets a rate limit and the end of the context", ONCE)(
        partial(limited, _chat, _RATE_LIMITS[_chat])
    )

if __name__ == "__main__":
    main()
