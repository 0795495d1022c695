# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///
"""The `langchain-openai` package."""

from functools import partial
from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from openai import LengthFinishReasonError

from bench.clients import cases
from bench.clients.schemas import Person


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"weather in {city}: sunny"


def chat(mode: cases.Mode) -> Any:
    fields: Any = {
        "base_url": cases.API,
        "api_key": "none",
        "model": cases.MODEL,
        "max_tokens": 300,
    }
    return ChatOpenAI(temperature=mode.temperature, max_retries=0, **fields)


def join(runnable: Any, question: Any, mode: cases.Mode) -> Any:
    """Return the answer, or the sum of the chunks of its stream."""
    if not mode.stream:
        return runnable.invoke(question)
    first, *others = runnable.stream(question)
    for chunk in others:
        first = first + chunk
    return first


def extract(method: str, mode: cases.Mode) -> str:
    runnable = chat(mode).with_structured_output(Person, method=method)
    if mode.stream:
        *_, person = runnable.stream(cases.PERSON)
    else:
        person = runnable.invoke(cases.PERSON)
    cases.check(isinstance(person, Person), person)
    return repr(person)


cases.case("with_structured_output: json_schema")(partial(extract, "json_schema"))
cases.case("with_structured_output: function_calling")(partial(extract, "function_calling"))


@cases.case("with_structured_output: json_mode")
def json_mode(mode: cases.Mode) -> str:
    runnable = chat(mode).with_structured_output(None, method="json_mode")
    try:
        value = (
            [*runnable.stream(cases.PERSON)][-1] if mode.stream else runnable.invoke(cases.PERSON)
        )
    except LengthFinishReasonError:
        return "cut by length"  # nothing bounds the object
    cases.check(isinstance(value, dict), value)
    return "an object"


@cases.case("bind_tools, called and answered")
def tools(mode: cases.Mode) -> str:
    runnable = chat(mode).bind_tools([get_weather], strict=True)
    message = join(runnable, cases.WEATHER, mode)
    if not message.tool_calls and mode.temperature:
        return "text"
    call = message.tool_calls[0]
    result = get_weather.invoke(call)
    answer = join(runnable, [("user", cases.WEATHER), message, result], mode)
    return f"{call['args']} -> {answer.content}"


@cases.case("bind_tools: tool_choice any")
def forced(mode: cases.Mode) -> str:
    message = join(chat(mode).bind_tools([Person], tool_choice="any"), cases.PERSON, mode)
    cases.check(message.tool_calls, message)
    return str(message.tool_calls[0]["name"])


@cases.case("OpenAI, the class of completions", cases.WHOLE)
def completions(mode: cases.Mode) -> str:
    fields: Any = {"base_url": cases.API, "api_key": "none", "model": cases.MODEL, "max_tokens": 20}
    texts = OpenAI(temperature=mode.temperature, **fields).batch(["One, two,", "Three, four,"])
    cases.check(len(texts) == 2, texts)
    return "two texts"


@cases.once("a conversation that is too long")
def overflow() -> str:
    ask = chat(cases.WHOLE[0]).invoke
    return type(cases.expect(ContextOverflowError, lambda: ask(cases.OVERFLOW))).__name__


if __name__ == "__main__":
    cases.main()
