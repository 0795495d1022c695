# /// script
# dependencies = ["guidellm==0.8.1"]
# ///
"""The load generator GuideLLM; its packages take 6 GB."""

import json
from pathlib import Path
from typing import Any

from bench.clients import cases

SWEEP_SIZE = 4
SYNTHETIC = {"kind": "synthetic_text", "prompt_tokens": 50, "output_tokens": 20}


def benchmark(data: dict[str, Any], profile: dict[str, Any], **backend: Any) -> str:
    target = {"kind": "openai_http", "target": cases.URL, "model": cases.MODEL, **backend}
    config, results = Path("config.json"), Path("benchmarks.json")
    spec = {
        "backend": target,
        "profile": profile,
        "constraints": [{"kind": "max_requests", "count": 12}],
        "tokenizer": {"kind": "huggingface_auto", "model": cases.CHECKPOINT},
        "data": [data],
        "outputs": [{"kind": "json", "path": str(results.absolute())}],
    }
    config.write_text(json.dumps({"spec": spec}))
    cases.command("guidellm", "run", "--config", config.absolute(), "--disable-console-interactive")
    benchmarks = json.loads(results.read_text())["benchmarks"]
    totals = [benchmark["metrics"]["request_totals"] for benchmark in benchmarks]
    cases.check(totals and not any(total["errored"] for total in totals), totals)
    cases.check(all(total["successful"] for total in totals), totals)
    return f"{len(totals)} benchmarks, {sum(total['successful'] for total in totals)} answers"


@cases.once("a sweep from one request at a time to its maximum")
def sweep() -> str:
    prompts = Path("prompts.json")
    questions = [{"prompt": f"Count from {first} to {first + 20}."} for first in range(60)]
    prompts.write_text(json.dumps(questions))
    data = {"kind": "json_file", "path": str(prompts.absolute())}
    profile = {"kind": "sweep", "sweep_size": SWEEP_SIZE, "max_concurrency": 8}
    return benchmark(data, profile, max_tokens=64, extras={"body": {"temperature": 0}})


@cases.once("synthetic data, whose answers have a length")
def synthetic() -> str:
    return benchmark(SYNTHETIC, {"kind": "throughput", "max_concurrency": 4})


if __name__ == "__main__":
    cases.main()
