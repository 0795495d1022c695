"""The clients: each at a pinned version, what is asked of it, and what it said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.clients.place import QUESTION, ClientFailed, Place
from bench.harness.venvs import Venv
from gateway.loadgen.drafts import Drafts
from gateway.loadgen.prompts import built_in_prompts

_HERE: Final = Path(__file__).parent
_SWEEP_SIZE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One client."""

    name: str
    does: str
    version: str = ""
    """Of the package of that name; empty: no Python package, it is there or it is not."""
    use: Callable[[Path, Place], str]
    """From the folder of its commands to what it said."""

    @property
    def venv(self) -> Venv | None:
        """Return where it is installed, alone with what it needs."""
        pins = (f"{self.name}=={self.version}",)
        return Venv(name=f"client-{self.name}", pins=pins) if self.version else None


def _openai(commands: Path, place: Place) -> str:
    return _asked(place.run(commands / "python", _HERE / "with_openai.py", *_question(place)))


def _litellm(commands: Path, place: Place) -> str:
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return _asked(
        place.run(
            commands / "python", _HERE / "with_litellm.py", *_question(place), environment=quiet
        )
    )


def _question(place: Place) -> tuple[str, str, str]:
    return place.url, place.model, QUESTION


def _asked(printed: str) -> str:
    told = json.loads(printed.splitlines()[-1])
    if not told["same"]:
        raise ClientFailed("the streamed answer is not the whole one")
    seen = [
        f"{kind}: {metrics['speculative_decoding']['draft_acceptance_rate']:.1%} of drafts "
        f"accepted, {metrics['speculative_decoding']['mean_acceptance_length']:.2f} tokens a step"
        if metrics
        else f"{kind}: it keeps no field that it does not know, `metrics` neither"
        for kind, metrics in (("whole", told["whole"]), ("streamed", told["streamed"]))
    ]
    return f"the same {told['tokens']} tokens whole and streamed; {'; '.join(seen)}"


def _llm(commands: Path, place: Place) -> str:
    models = f"- model_id: line\n  model_name: {place.model}\n  api_base: {place.url}/v1\n"
    (place.folder / "extra-openai-models.yaml").write_text(models)
    ask = (commands / "llm", "prompt", "-m", "line", "-o", "temperature", "0", "--no-log", QUESTION)
    own = {"LLM_USER_PATH": str(place.folder)}
    streamed = place.run(*ask, environment=own).strip()
    whole = place.run(*ask, "--no-stream", environment=own).strip()
    if streamed != whole:
        raise ClientFailed("the streamed answer is not the whole one")
    return f"the same whole and streamed: “{whole[:40]}…”"


def _aiperf(commands: Path, place: Place) -> str:
    prompts = place.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in _prompts(16)))
    before = place.drafts()
    place.run(
        commands / "aiperf",
        *("profile", "--url", place.url, "--model", place.model, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", place.checkpoint, "--ui", "none"),
        *("--input-file", prompts, "--custom-dataset-type", "single_turn"),
        *("--concurrency", "4", "--request-count", "16", "--extra-inputs", "temperature:0"),
        *("--artifact-dir", place.folder / "artifacts"),
    )
    (record,) = (place.folder / "artifacts").rglob("profile_export_aiperf.json")
    told = json.loads(record.read_text())
    length = _average(told, "spec_decode_token_weighted_acceptance_length")
    rate = _average(told, "spec_decode_overall_draft_acceptance_rate")
    here = place.drafts().since(before)
    its = Drafts(
        steps=int(_average(told, "total_spec_decode_steps")),
        drafted=int(_average(told, "total_draft_tokens")),
        accepted=int(_average(told, "total_accepted_draft_tokens")),
    )
    same = (its.steps, its.drafted, its.accepted) == (here.steps, here.drafted, here.accepted)
    beside = "as the line counted" if same else f"the line counted {here}"
    return (
        f"{_average(told, 'request_count'):.0f} requests; acceptance length {length:.2f}, "
        f"draft acceptance rate {rate:.1f}%; {its.steps} steps, {its.drafted} drafted, "
        f"{its.accepted} accepted, {beside}"
    )


def _average(told: Mapping[str, Any], name: str) -> float:
    try:
        return float(told[name]["avg"])
    except (KeyError, TypeError):
        raise ClientFailed(f"its record has no '{name}'") from None


def _guidellm(commands: Path, place: Place) -> str:
    prompts, config, results = (
        place.folder / name for name in ("prompts.json", "sweep.json", "benchmarks.json")
    )
    prompts.write_text(json.dumps([{"prompt": text} for text in _prompts(60)]))
    backend = {
        "kind": "openai_http",
        "target": place.url,
        "model": place.model,
        "max_tokens": 64,
        "extras": {"body": {"temperature": 0}},
    }
    spec = {
        "backend": backend,
        "profile": {"kind": "sweep", "sweep_size": _SWEEP_SIZE, "max_concurrency": 8},
        "constraints": [{"kind": "max_requests", "count": 12}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(place.checkpoint)},
        "data": [{"kind": "json_file", "path": str(prompts)}],
        "outputs": [{"kind": "json", "path": str(results)}],
    }
    config.write_text(json.dumps({"spec": spec}))
    place.run(commands / "guidellm", "run", "--config", config, "--disable-console-interactive")
    ran = json.loads(results.read_text())["benchmarks"]
    totals = [each["metrics"]["request_totals"] for each in ran]
    if len(ran) != _SWEEP_SIZE or any(total["errored"] for total in totals):
        raise ClientFailed(f"{len(ran)} of {_SWEEP_SIZE} benchmarks: {totals}")
    answered = sum(total["successful"] for total in totals)
    return f"a sweep of {len(ran)} benchmarks, {answered} requests answered, none failed"


def _prompts(count: int) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in built_in_prompts()[:count]]


def _promtool(_commands: Path, place: Place) -> str:
    found = shutil.which("promtool")
    if found is None:
        raise ClientFailed("is not on this machine (Debian: prometheus)")
    version = place.run(found, "--version").split()[2]
    # It ends with 3 where it would write something in another way.
    said = place.run(found, "check", "metrics", stdin=place.metrics(), good=(0, 3)).splitlines()
    others = [line for line in said if not (line.startswith("vllm:") and "':'" in line)]
    if others:
        raise ClientFailed(f"{version}: {'; '.join(others)[:300]}")
    return f"{version}: complains of the ':' in vLLM's own {len(said)} names, of nothing else"


_ASKS: Final = "asks whole and streamed"
TOOLS: Final = (
    Tool(name="openai", version="3.51.0", does=_ASKS, use=_openai),
    Tool(name="litellm", version="1.106.2", does=_ASKS, use=_litellm),
    Tool(name="llm", version="0.36", does=_ASKS, use=_llm),
    Tool(
        name="aiperf",
        version="0.13.0",
        does="16 requests, 4 at once, and their acceptance",
        use=_aiperf,
    ),
    Tool(
        name="guidellm",
        version="0.8.1",
        does="a sweep from one at a time to as many as it takes",
        use=_guidellm,
    ),
    Tool(name="promtool", does="checks /metrics", use=_promtool),
)
