# /// script
# dependencies = ["llm==0.36"]
# ///
"""The command `llm`."""

from __future__ import annotations

import os
from pathlib import Path

from bench.clients.cases import API, COUNT, MODEL, PERSON, Mode, case, check, command, main

os.environ["LLM_USER_PATH"] = str(Path.cwd())
Path("extra-openai-models.yaml").write_text(
    f"- model_id: bench\n  model_name: {MODEL}\n  api_base: {API}\n  supports_schema: true\n"
    "  reasoning: true\n"
)


def prompt(question: str, mode: Mode, *options: str) -> str:
    words = ["llm", "prompt", "-m", "bench", "-o", "temperature", str(mode.temperature)]
    stream = () if mode.stream else ("--no-stream",)
    return command(*words, "--no-log", *options, *stream, question).strip()


@case("prompt")
def text(mode: Mode) -> str:
    answer = prompt(COUNT, mode, "-o", "max_tokens", "60")
    check(answer and (mode.temperature or "1, 2, 3" in answer), answer)
    return f"{answer[:20]}…"


@case("--schema")
def schema(mode: Mode) -> str:
    answer = prompt(PERSON, mode, "--schema", "age int, merry bool")
    check('"age"' in answer, answer)
    return answer


@case("-o reasoning_effort low")
def effort(mode: Mode) -> str:
    return prompt(COUNT, mode, "-o", "reasoning_effort", "low", "-o", "max_tokens", "60")[:20]


if __name__ == "__main__":
    main()
