"""The clients: each at a pinned version, with a task that returns a line about the result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.clients.workspace import QUESTION, ClientFailed, Workspace
from bench.harness.venvs import Venv
from gateway.loadgen.drafts import Drafts
from gateway.loadgen.prompts import built_in_prompts

_HERE: Final = Path(__file__).parent
_SWEEP_SIZE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A client and its task."""

    name: str
    task: str
    version: str = ""
    """The version of the Python package of that name; empty for other programs."""
    run: Callable[[Path, Workspace], str]
    """Function from the folder of its commands to a line about the result."""

    @property
    def venv(self) -> Venv | None:
        """Return the virtual environment of the client, or None for other programs."""
        pins = (f"{self.name}=={self.version}",)
        return Venv(name=f"client-{self.name}", pins=pins) if self.version else None


def _openai(commands: Path, workspace: Workspace) -> str:
    return _compare_answers(
        workspace.run(commands / "python", _HERE / "with_openai.py", *_arguments(workspace))
    )


def _litellm(commands: Path, workspace: Workspace) -> str:
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return _compare_answers(
        workspace.run(
            commands / "python",
            _HERE / "with_litellm.py",
            *_arguments(workspace),
            environment=environment,
        )
    )


def _arguments(workspace: Workspace) -> tuple[str, str, str]:
    return workspace.url, workspace.model, QUESTION


def _compare_answers(printed: str) -> str:
    result = json.loads(printed.splitlines()[-1])
    if not result["same"]:
        raise ClientFailed("the streamed answer differs from the complete one")
    summaries = [
        f"{kind}: {metrics['speculative_decoding']['draft_acceptance_rate']:.1%} of drafts "
        f"accepted, {metrics['speculative_decoding']['mean_acceptance_length']:.2f} tokens a step"
        if metrics
        else f"{kind}: it drops unknown fields such as `metrics`"
        for kind, metrics in (("complete", result["complete"]), ("streamed", result["streamed"]))
    ]
    return f"the same {result['tokens']} tokens complete and streamed; {'; '.join(summaries)}"


def _llm(commands: Path, workspace: Workspace) -> str:
    models = f"- model_id: line\n  model_name: {workspace.model}\n  api_base: {workspace.url}/v1\n"
    (workspace.folder / "extra-openai-models.yaml").write_text(models)
    arguments = (
        commands / "llm",
        "prompt",
        "-m",
        "line",
        "-o",
        "temperature",
        "0",
        "--no-log",
        QUESTION,
    )
    environment = {"LLM_USER_PATH": str(workspace.folder)}
    streamed = workspace.run(*arguments, environment=environment).strip()
    complete = workspace.run(*arguments, "--no-stream", environment=environment).strip()
    if streamed != complete:
        raise ClientFailed("the streamed answer differs from the complete one")
    return f"the same complete and streamed: “{complete[:40]}…”"


def _aiperf(commands: Path, workspace: Workspace) -> str:
    prompts = workspace.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in _prompts(16)))
    before = workspace.drafts()
    workspace.run(
        commands / "aiperf",
        *("profile", "--url", workspace.url, "--model", workspace.model, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", workspace.checkpoint, "--ui", "none"),
        *("--input-file", prompts, "--custom-dataset-type", "single_turn"),
        *("--concurrency", "4", "--request-count", "16", "--extra-inputs", "temperature:0"),
        *("--artifact-dir", workspace.folder / "artifacts"),
    )
    (record,) = (workspace.folder / "artifacts").rglob("profile_export_aiperf.json")
    result = json.loads(record.read_text())
    length = _average(result, "spec_decode_token_weighted_acceptance_length")
    rate = _average(result, "spec_decode_overall_draft_acceptance_rate")
    counted = workspace.drafts().since(before)
    reported = Drafts(
        steps=int(_average(result, "total_spec_decode_steps")),
        drafted=int(_average(result, "total_draft_tokens")),
        accepted=int(_average(result, "total_accepted_draft_tokens")),
    )
    same = (reported.steps, reported.drafted, reported.accepted) == (
        counted.steps,
        counted.drafted,
        counted.accepted,
    )
    comparison = "equal to the counters" if same else f"the counters have {counted}"
    return (
        f"{_average(result, 'request_count'):.0f} requests; acceptance length {length:.2f}, "
        f"draft acceptance rate {rate:.1f}%; {reported.steps} steps, {reported.drafted} drafted, "
        f"{reported.accepted} accepted, {comparison}"
    )


def _average(result: Mapping[str, Any], name: str) -> float:
    try:
        return float(result[name]["avg"])
    except (KeyError, TypeError):
        raise ClientFailed(f"its results have no '{name}'") from None


def _guidellm(commands: Path, workspace: Workspace) -> str:
    prompts, config, results = (
        workspace.folder / name for name in ("prompts.json", "sweep.json", "benchmarks.json")
    )
    prompts.write_text(json.dumps([{"prompt": text} for text in _prompts(60)]))
    backend = {
        "kind": "openai_http",
        "target": workspace.url,
        "model": workspace.model,
        "max_tokens": 64,
        "extras": {"body": {"temperature": 0}},
    }
    spec = {
        "backend": backend,
        "profile": {"kind": "sweep", "sweep_size": _SWEEP_SIZE, "max_concurrency": 8},
        "constraints": [{"kind": "max_requests", "count": 12}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(workspace.checkpoint)},
        "data": [{"kind": "json_file", "path": str(prompts)}],
        "outputs": [{"kind": "json", "path": str(results)}],
    }
    config.write_text(json.dumps({"spec": spec}))
    workspace.run(commands / "guidellm", "run", "--config", config, "--disable-console-interactive")
    benchmarks = json.loads(results.read_text())["benchmarks"]
    totals = [benchmark["metrics"]["request_totals"] for benchmark in benchmarks]
    if len(benchmarks) != _SWEEP_SIZE or any(total["errored"] for total in totals):
        raise ClientFailed(f"{len(benchmarks)} of {_SWEEP_SIZE} benchmarks: {totals}")
    answered = sum(total["successful"] for total in totals)
    return f"a sweep of {len(benchmarks)} benchmarks, {answered} requests answered, none failed"


def _prompts(count: int) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in built_in_prompts()[:count]]


def _promtool(_commands: Path, workspace: Workspace) -> str:
    executable = shutil.which("promtool")
    if executable is None:
        raise ClientFailed("is not installed (Debian: prometheus)")
    version = workspace.run(executable, "--version").split()[2]
    # It exits with 3 for style warnings.
    messages = workspace.run(
        executable, "check", "metrics", stdin=workspace.metrics(), expected_codes=(0, 3)
    ).splitlines()
    unexpected = [line for line in messages if not (line.startswith("vllm:") and "':'" in line)]
    if unexpected:
        raise ClientFailed(f"{version}: {'; '.join(unexpected)[:300]}")
    return f"{version}: only warns about the ':' in the {len(messages)} names of vLLM"


_CHAT_TASK: Final = "sends a request, streamed and not"
TOOLS: Final = (
    Tool(name="openai", version="3.51.0", task=_CHAT_TASK, run=_openai),
    Tool(name="litellm", version="1.106.2", task=_CHAT_TASK, run=_litellm),
    Tool(name="llm", version="0.36", task=_CHAT_TASK, run=_llm),
    Tool(
        name="aiperf",
        version="0.13.0",
        task="sends 16 requests, 4 at once, and reports acceptance",
        run=_aiperf,
    ),
    Tool(
        name="guidellm",
        version="0.8.1",
        task="runs a sweep from one request at a time to its maximum",
        run=_guidellm,
    ),
    Tool(name="promtool", task="checks /metrics", run=_promtool),
)
