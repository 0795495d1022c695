"""Send a request with the `openai` package, streamed and not; print the results as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI


def main(url: str, model: str, question: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    create: Any = client.chat.completions.create
    request = {
        "model": model,
        "temperature": 0,
        "messages": [{"role": "user", "content": question}],
    }
    answer = create(**request)
    stream = create(**request, stream=True, stream_options={"include_usage": True})
    text, metrics = "", None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        metrics = (chunk.model_extra or {}).get("metrics") or metrics
    result = {
        "same": text == answer.choices[0].message.content,
        "tokens": answer.usage.completion_tokens,
        "complete": (answer.model_extra or {}).get("metrics"),
        "streamed": metrics,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
