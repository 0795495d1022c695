# /// script
# dependencies = ["llm==0.36"]
# ///
"""The command `llm`."""

import json
import os
from pathlib import Path

from bench.clients import cases

os.environ["LLM_USER_PATH"] = str(Path.cwd())
_MODEL: dict[str, object] = {"model_id": "bench", "model_name": cases.MODEL, "api_base": cases.API}
_MODEL |= {"supports_schema": True, "reasoning": True}
Path("extra-openai-models.yaml").write_text(json.dumps([_MODEL]))  # JSON is YAML


def prompt(question: str, mode: cases.Mode, *options: str) -> str:
    words = ["llm", "prompt", "-m", "bench", "-o", "temperature", str(mode.temperature)]
    stream = () if mode.stream else ("--no-stream",)
    return cases.command(*words, "--no-log", *options, *stream, question).strip()


@cases.case("prompt")
def text(mode: cases.Mode) -> str:
    answer = prompt(cases.COUNT, mode, "-o", "max_tokens", "60")
    cases.check(answer and (mode.temperature or "1, 2, 3" in answer), answer)
    return f"{answer[:20]}…"


@cases.case("--schema")
def schema(mode: cases.Mode) -> str:
    answer = prompt(cases.PERSON, mode, "--schema", "age int, merry bool")
    cases.check('"age"' in answer, answer)
    return answer


@cases.case("-o reasoning_effort low")
def effort(mode: cases.Mode) -> str:
    return prompt(cases.COUNT, mode, "-o", "reasoning_effort", "low", "-o", "max_tokens", "60")[:20]


if __name__ == "__main__":
    cases.main()
