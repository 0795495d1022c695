"""Ask with the `openai` package, whole and streamed; print what it saw as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI


def main(url: str, model: str, question: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    create: Any = client.chat.completions.create
    asked = {
        "model": model,
        "temperature": 0,
        "messages": [{"role": "user", "content": question}],
    }
    answer = create(**asked)
    stream = create(**asked, stream=True, stream_options={"include_usage": True})
    text, metrics = "", None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        metrics = (chunk.model_extra or {}).get("metrics") or metrics
    told = {
        "same": text == answer.choices[0].message.content,
        "tokens": answer.usage.completion_tokens,
        "whole": (answer.model_extra or {}).get("metrics"),
        "streamed": metrics,
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
