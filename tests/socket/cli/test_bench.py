"""`paceline bench`, as a person types it, against a real gateway and a worker behind sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gateway.cli import main
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_worker import DONE, USAGE, Script, ScriptedWorker, chunk, event

ROOT = Path(__file__).parents[3]

STEPS = {
    "num_spec_tokens": 2,
    "num_spec_steps": 10,
    "num_draft_tokens": 20,
    "num_accepted_draft_tokens": 11,
    "acceptance_histogram": [3, 3, 4],
    "mean_acceptance_length": 2.1,
    "draft_acceptance_rate": 0.55,
}
LAST = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "demo", "choices": []}
DRAFTED = Script(
    events=(
        *(chunk({"content": word}) for word in ("one", " two", " three")),
        chunk({}, "stop"),
        event({**LAST, "usage": USAGE, "metrics": {"speculative_decoding": STEPS}}),
        DONE,
    )
)

VLLM_SAYS = (
    " Serving Benchmark Result ",
    "Successful requests:",
    "Failed requests:",
    "Benchmark duration (s):",
    "Total input tokens:",
    "Total generated tokens:",
    "Request throughput (req/s):",
    "Output token throughput (tok/s):",
    "Peak output token throughput (tok/s):",
    "Peak concurrent requests:",
    "Total token throughput (tok/s):",
    "Time to First Token",
    *("Mean TTFT (ms):", "Median TTFT (ms):", "P99 TTFT (ms):"),
    "Time per Output Token (excl. 1st token)",
    *("Mean TPOT (ms):", "Median TPOT (ms):", "P99 TPOT (ms):"),
    "Inter-token Latency",
    *("Mean ITL (ms):", "Median ITL (ms):", "P99 ITL (ms):"),
    "Speculative Decoding",
    "Acceptance rate (%):",
    "Acceptance length:",
    "Drafts:",
    "Draft tokens:",
    "Accepted tokens:",
    "Per-position acceptance (%):",
    "  Position 0:",
)


@pytest.fixture
def gateway_with_drafts(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> RunningGateway:
    """A line whose worker tells of drafts."""
    worker.script = DRAFTED
    return gateway_with_worker


def bench(line: RunningGateway, *arguments: str) -> int:
    return main(["bench", "--url", line.url, *arguments])


def test_figures_are_printed_written_and_drawn(
    gateway_with_drafts: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, picture = tmp_path / "run.json", tmp_path / "run.svg"
    files = ("--json", str(record), "--plot", str(picture))
    assert bench(gateway_with_drafts, "--concurrency", "1,3", "--requests", "5", *files) == 0

    printed = capsys.readouterr().out
    shown = [line.split() for line in printed.splitlines()]
    for line in (
        "Successful requests: 5",
        "Failed requests: 0",
        "Maximum request concurrency: 3",
        "Total generated tokens: 15",
        "Acceptance rate (%): 55.00",
        "Acceptance length: 2.10",
        "Drafts: 50",
        "Draft tokens: 100",
        "Accepted tokens: 55",
        "Position 0: 70.00",
        "Position 1: 40.00",
    ):
        assert line.split() in shown, line
    first_block = printed.partition("=" * 50)[0]
    assert [line for line in VLLM_SAYS if line not in first_block] == []
    places = [first_block.index(line) for line in VLLM_SAYS]
    assert places == sorted(places), "in vLLM's order"
    assert "3 concurrent" in printed

    told = json.loads(record.read_text())
    first, second = told["runs"]
    body = {"max_tokens": 256, "temperature": 0.0}
    assert told["endpoints"] == [{"url": gateway_with_drafts.url, "model": "demo", "body": body}]
    assert (first["max_concurrency"], second["max_concurrency"]) == (1, 3)
    assert second["max_concurrent_requests"] <= 3
    assert first["total_input_tokens"] == 5 * 7, "as the worker's usage says"
    assert first["spec_decode_per_position_acceptance_rates"] == [0.7, 0.4]
    assert first["spec_decode_counted_by"] == "answers"
    assert first["median_ttft_ms"] > 0
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_two_endpoints_are_measured_in_turn_with_the_same_prompts(
    gateway_with_drafts: RunningGateway,
    worker: ScriptedWorker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = tmp_path / "run.json"
    other = ("--compare", f"{gateway_with_drafts.url}/v1", "--compare-body", '{"max_tokens": 7}')
    assert bench(gateway_with_drafts, *other, "--requests", "2", "--json", str(record)) == 0

    measured = worker.requests[4:]  # behind two first tries and two warm-ups
    assert [heard.body["max_tokens"] for heard in measured] == [256, 256, 7, 7] * 2
    asked = [heard.body["messages"] for heard in measured]
    assert asked[:2] == asked[2:4]
    assert asked[:2] != asked[4:6], "no turn repeats the prompts of the one before"

    told = json.loads(record.read_text())
    assert [run["endpoint"] for run in told["runs"]] == ["A", "B", "A", "B"]
    by_name = {ratio["figure"]: ratio for ratio in told["ratios"]}
    assert by_name["spec_decode_acceptance_rate"]["ratio"] == 1.0
    printed = capsys.readouterr().out
    for shown in ("A / B", f"A1: demo on {gateway_with_drafts.url} max_tokens=256", "max_tokens=7"):
        assert shown in printed


def test_requests_that_fail_are_counted_and_named(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Script()
    bad = Script(cut_after=2)
    worker.script = Script(rotation=(good, good, good, bad))  # first try, warm-up, then these two
    assert bench(gateway_with_worker, "--requests", "2") == 0
    said = capsys.readouterr()
    assert ["Failed", "requests:", "1"] in [
        gateway_with_worker.split() for gateway_with_worker in said.out.splitlines()
    ]
    assert "paceline: failed: broke off:" in said.err


def test_an_interrupted_sweep_tells_what_it_has_measured(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    first_try_warm_up_and_level = 1 + 1 + 2
    worker.script = Script(
        rotation=(*[DRAFTED] * first_try_warm_up_and_level, *[Script(hang=True)] * 100)
    )
    record = tmp_path / "run.json"
    command = ("bench", "--url", gateway_with_worker.url, "--concurrency", "1,2", "--requests", "2")
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", *command, "--json", str(record)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            enough = first_try_warm_up_and_level + 1
            wait_until(lambda: len(worker.requests) >= enough, within_s=60)
            process.send_signal(signal.SIGINT)
            printed, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said) == (130, "")
    assert printed.count("Serving Benchmark Result") == 1
    assert [run["max_concurrency"] for run in json.loads(record.read_text())["runs"]] == [1]


def test_without_any_draft_there_is_no_speculative_block(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    worker.script = Script(
        events=(chunk({"content": "one"}), chunk({}, "stop"), event({**LAST, "usage": USAGE}), DONE)
    )
    assert bench(gateway_with_worker, "--requests", "2", "--rate", "100") == 0
    printed = capsys.readouterr().out
    assert "Request rate configured (RPS):" in printed
    assert "Speculative Decoding" not in printed


def test_prompts_of_ones_own_are_asked(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    system = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Two?"}]
    lines = ({"prompt": "One?", "max_tokens": 9}, {"messages": system})
    prompts.write_text("\n".join(map(json.dumps, lines)))
    body = '{"top_p": 0.5}'
    assert (
        bench(gateway_with_worker, "--prompts", str(prompts), "--requests", "2", "--body", body)
        == 0
    )
    bodies = [heard.body for heard in worker.requests[-2:]]
    assert {body["messages"][-1]["content"]: body["max_tokens"] for body in bodies} == {
        "One?": 9,
        "Two?": 256,
    }
    assert {body["top_p"] for body in bodies} == {0.5}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--url", "http://127.0.0.1:9"), "nothing answers at http://127.0.0.1:9"),
        (("--url", "nonsense"), "'nonsense' is not a URL"),
        (("--model", "gpt-99"), "does not answer: 404"),
        (("--prompts", "none.jsonl"), "none.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_sentence(
    gateway_with_worker: RunningGateway, arguments: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(SystemExit, match=sentence):
        bench(gateway_with_worker, *arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--plot", "run.pdf"), "ends in .svg"),
        (("--plot", "no/such/folder/run.svg"), "no/such/folder/run.svg cannot be written"),
        (("--json", "/"), "/ cannot be written"),
        (("--concurrency", "1,0"), "'0' is not a number above 0"),
        (("--rate", "1", "--concurrency", "2"), "not allowed with"),
        (("--body", "[]"), "must be a JSON object"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert sentence in capsys.readouterr().err
