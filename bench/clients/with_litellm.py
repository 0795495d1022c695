"""Ask with the `litellm` package, whole and streamed; print what it saw as JSON."""

from __future__ import annotations

import json
import sys

import litellm  # type: ignore[import-not-found]  # it is installed in that venv alone


def main(url: str, model: str, question: str) -> None:
    asked = {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "temperature": 0,
        "messages": [{"role": "user", "content": question}],
    }
    answer = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    told = {
        "same": text == answer.choices[0].message.content,
        "tokens": answer.usage.completion_tokens,
        "whole": getattr(answer, "metrics", None),
        "streamed": next(filter(None, (getattr(chunk, "metrics", None) for chunk in chunks)), None),
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
