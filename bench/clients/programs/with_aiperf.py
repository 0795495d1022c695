# /// script
# dependencies = ["aiperf==0.13.0"]
# ///
"""The load generator AIPerf: does it report the acceptance that the gateway counts?"""

import json
import re
from pathlib import Path
from typing import Any

from bench.clients import cases

COUNTS = {
    "total_spec_decode_steps": "vllm:spec_decode_num_drafts_total",
    "total_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "total_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
"""AIPerf's names of the counts, and those of the gateway."""


def counters() -> dict[str, int]:
    exposition = cases.get("/metrics")
    return {
        name: sum(
            int(float(value))
            for value in re.findall(rf"^{counter}\S* (\S+)", exposition, re.MULTILINE)
        )
        for name, counter in COUNTS.items()
    }


def profile(*options: str) -> dict[str, Any]:
    cases.command(
        *(
            "aiperf",
            "profile",
            "--url",
            cases.URL,
            "--model",
            cases.MODEL,
            "--endpoint-type",
            "chat",
        ),
        *("--streaming", "--tokenizer", cases.CHECKPOINT, "--ui", "none"),
        *("--concurrency", "4", "--request-count", "16", "--extra-inputs", "temperature:0"),
        *("--artifact-dir", "artifacts", *options),
    )
    (record,) = Path("artifacts").rglob("profile_export_aiperf.json")
    result: dict[str, Any] = json.loads(record.read_text())
    record.unlink()
    return result


@cases.once("16 requests, 4 at once: acceptance")
def acceptance() -> str:
    questions = [f"Count from {first} to {first + 20}." for first in range(16)]
    prompts = Path("prompts.jsonl")
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in questions))
    before = counters()
    result = profile("--input-file", str(prompts), "--custom-dataset-type", "single_turn")
    counted = {name: count - before[name] for name, count in counters().items()}
    reported = {name: int(result[name]["avg"]) for name in COUNTS}
    cases.check(reported == counted, f"reported {reported}, counted {counted}")
    rate = result["spec_decode_overall_draft_acceptance_rate"]["avg"]
    return f"draft acceptance rate {rate:.1f}%, as the gateway counts"


@cases.once("16 synthetic requests with ignore_eos")
def synthetic() -> str:
    result = profile("--extra-inputs", "ignore_eos:true", "--output-tokens-mean", "20")
    return f"{result['request_count']['avg']:.0f} requests"


if __name__ == "__main__":
    cases.main()
