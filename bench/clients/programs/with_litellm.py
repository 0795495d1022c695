# /// script
# dependencies = ["litellm==1.106.2"]
# ///
"""The `litellm` package."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import, which fetches one

import litellm

from bench.clients.cases import (
    API,
    COUNT,
    MODEL,
    ONCE,
    OVERFLOW,
    PERSON,
    WHOLE,
    Mode,
    case,
    check,
    expect,
    main,
)
from bench.clients.schemas import Person


def ask(question: str, mode: Mode, **more: Any) -> Any:
    fields = {"model": f"hosted_vllm/{MODEL}", "api_base": API, "api_key": "none", **more}
    messages = [{"role": "user", "content": question}]
    if not mode.stream:
        return litellm.completion(messages=messages, temperature=mode.temperature, **fields)
    chunks = litellm.completion(
        messages=messages, temperature=mode.temperature, stream=True, **fields
    )
    return litellm.stream_chunk_builder([*chunks])


@case("chat")
def text(mode: Mode) -> str:
    content = ask(COUNT, mode, max_tokens=100).choices[0].message.content
    check(content and (mode.temperature or "1, 2, 3" in content), content)
    return "text"


@case("response_format: a pydantic model")
def structured(mode: Mode) -> str:
    content = ask(PERSON, mode, response_format=Person).choices[0].message.content
    return repr(Person.model_validate_json(content))


@case("text_completion: two prompts", WHOLE)
def completions(mode: Mode) -> str:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=API,
        api_key="none",
        prompt=["One, two,", "Three, four,"],
        max_tokens=10,
        temperature=mode.temperature,
    )
    check(len(answer.choices) == 2, answer)
    return "two texts"


@case("a conversation that is too long", ONCE)
def overflow(mode: Mode) -> str:
    error = expect(litellm.ContextWindowExceededError, lambda: ask(OVERFLOW, mode))
    return type(error).__name__


if __name__ == "__main__":
    main()
