# /// script
# dependencies = ["litellm==1.106.2"]
# ///
"""The `litellm` package."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import, which fetches one

import litellm

from bench.clients import cases
from bench.clients.schemas import Person


def ask(question: str, mode: cases.Mode, **more: Any) -> Any:
    fields = {
        "model": f"hosted_vllm/{cases.MODEL}",
        "api_base": cases.API,
        "api_key": "none",
        **more,
    }
    messages = [{"role": "user", "content": question}]
    if not mode.stream:
        return litellm.completion(messages=messages, temperature=mode.temperature, **fields)
    chunks = litellm.completion(
        messages=messages, temperature=mode.temperature, stream=True, **fields
    )
    return litellm.stream_chunk_builder([*chunks])


@cases.case("chat")
def text(mode: cases.Mode) -> str:
    content = ask(cases.COUNT, mode, max_tokens=100).choices[0].message.content
    cases.check(content and (mode.temperature or "1, 2, 3" in content), content)
    return "text"


@cases.case("response_format: a pydantic model")
def structured(mode: cases.Mode) -> str:
    content = ask(cases.PERSON, mode, response_format=Person).choices[0].message.content
    return repr(Person.model_validate_json(content))


@cases.case("text_completion: two prompts", cases.WHOLE)
def completions(mode: cases.Mode) -> str:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{cases.MODEL}",
        api_base=cases.API,
        api_key="none",
        prompt=["One, two,", "Three, four,"],
        max_tokens=10,
        temperature=mode.temperature,
    )
    cases.check(len(answer.choices) == 2, answer)
    return "two texts"


@cases.once("a conversation that is too long")
def overflow() -> str:
    error = cases.expect(
        litellm.ContextWindowExceededError, lambda: ask(cases.OVERFLOW, cases.WHOLE[0])
    )
    return type(error).__name__


if __name__ == "__main__":
    cases.main()
