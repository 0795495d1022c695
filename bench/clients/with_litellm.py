"""Send a request with the `litellm` package, streamed and not; print the results as JSON."""

from __future__ import annotations

import json
import sys

import litellm  # type: ignore[import-not-found]  # installed only in the client's environment


def main(url: str, model: str, question: str) -> None:
    request = {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "temperature": 0,
        "messages": [{"role": "user", "content": question}],
    }
    answer = litellm.completion(**request)
    chunks = list(
        litellm.completion(**request, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    result = {
        "same": text == answer.choices[0].message.content,
        "tokens": answer.usage.completion_tokens,
        "complete": getattr(answer, "metrics", None),
        "streamed": next(filter(None, (getattr(chunk, "metrics", None) for chunk in chunks)), None),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
