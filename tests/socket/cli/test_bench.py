"""`paceline bench` as a user runs it, against a real gateway and a worker behind sockets."""

import json
import os
import signal
from pathlib import Path

import pytest

from gateway.cli import main
from tests.support.paceline_forks import PIPES, PacelineFork
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_worker import DONE, USAGE, Script, ScriptedWorker, chunk, event

STEPS = {
    "num_spec_tokens": 2,
    "num_spec_steps": 10,
    "num_draft_tokens": 20,
    "num_accepted_draft_tokens": 11,
    "acceptance_histogram": [3, 3, 4],
    "mean_acceptance_length": 2.1,
    "draft_acceptance_rate": 0.55,
}
LAST_CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "demo"} | {
    "choices": [],
    "usage": USAGE,
}
WORDS = tuple(chunk({"content": word}) for word in ("one", " two", " three"))
LAST = event({**LAST_CHUNK, "metrics": {"speculative_decoding": STEPS}})
DRAFTED = Script(events=(*WORDS, chunk({}, "stop"), LAST, DONE))
VLLM_LINES = (
    " Serving Benchmark Result ",
    *("Successful requests:", "Failed requests:", "Benchmark duration (s):"),
    *("Total input tokens:", "Total generated tokens:", "Request throughput (req/s):"),
    *("Output token throughput (tok/s):", "Peak output token throughput (tok/s):"),
    *("Peak concurrent requests:", "Total token throughput (tok/s):"),
    "Time to First Token",
    *("Mean TTFT (ms):", "Median TTFT (ms):", "P99 TTFT (ms):"),
    "Time per Output Token (excl. 1st token)",
    *("Mean TPOT (ms):", "Median TPOT (ms):", "P99 TPOT (ms):"),
    "Inter-token Latency",
    *("Mean ITL (ms):", "Median ITL (ms):", "P99 ITL (ms):"),
    "Speculative Decoding",
    *("Acceptance rate (%):", "Acceptance length:", "Drafts:", "Draft tokens:"),
    *("Accepted tokens:", "Per-position acceptance (%):", "  Position 0:"),
)


def bench(gateway: RunningGateway, *arguments: str) -> int:
    return main(["bench", "--url", gateway.url, *arguments])


def test_results_are_printed_and_written(gateway_with_worker, worker, tmp_path, capsys) -> None:
    worker.script = DRAFTED
    record = tmp_path / "run.json"
    load = ("--concurrency", "1,3", "--requests", "5")
    assert bench(gateway_with_worker, *load, "--json", str(record)) == 0

    printed = capsys.readouterr().out
    printed_words = [line.split() for line in printed.splitlines()]
    for line in (
        *("Successful requests: 5", "Failed requests: 0", "Maximum request concurrency: 3"),
        *("Total generated tokens: 15", "Acceptance rate (%): 55.00", "Acceptance length: 2.10"),
        *("Drafts: 50", "Draft tokens: 100", "Accepted tokens: 55"),
        *("Position 0: 70.00", "Position 1: 40.00"),
    ):
        assert line.split() in printed_words, line
    first_block = printed.partition("=" * 50)[0]
    assert [line for line in VLLM_LINES if line not in first_block] == []
    positions = [first_block.index(line) for line in VLLM_LINES]
    assert positions == sorted(positions), "in vLLM's order"
    assert "3 concurrent" in printed

    result = json.loads(record.read_text())
    first, second = result["runs"]
    body = {"max_tokens": 256, "temperature": 0.0}
    assert result["endpoints"] == [{"url": gateway_with_worker.url, "model": "demo", "body": body}]
    assert (first["max_concurrency"], second["max_concurrency"]) == (1, 3)
    assert second["max_concurrent_requests"] <= 3
    assert first["total_input_tokens"] == 5 * 7, "from the worker's usage"
    assert first["spec_decode_per_position_acceptance_rates"] == [0.7, 0.4]
    assert first["spec_decode_counted_by"] == "answers"
    assert first["median_ttft_ms"] > 0


def test_two_endpoints_are_measured_alternately_with_the_same_prompts(
    gateway_with_worker, worker, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("gateway.cli.bench._PIPED_WIDTH", 60)
    worker.script = DRAFTED
    record = tmp_path / "run.json"
    other = ("--compare", f"{gateway_with_worker.url}/v1", "--compare-body", '{"max_tokens": 7}')
    assert bench(gateway_with_worker, *other, "--requests", "2", "--json", str(record)) == 0

    measured = worker.requests[4:]  # after two first requests and two warm-ups
    assert [received.body["max_tokens"] for received in measured] == [256, 256, 7, 7] * 2
    messages = [received.body["messages"] for received in measured]
    assert messages[:2] == messages[2:4]
    assert messages[:2] != messages[4:6], "each round has new prompts"

    result = json.loads(record.read_text())
    assert [run["endpoint"] for run in result["runs"]] == ["A", "B", "A", "B"]
    by_name = {ratio["figure"]: ratio for ratio in result["ratios"]}
    assert by_name["spec_decode_acceptance_rate"]["ratio"] == 1.0
    printed = capsys.readouterr().out
    for text in ("A / B", f"A1: demo on {gateway_with_worker.url} max_tokens=256", "max_tokens=7"):
        assert text in " ".join(printed.split())
    for text in ("\n1 concurrent\n  Figure: Requests/s  A: ", "  TTFT p50: "):
        assert text in printed, "no column and no word is cut"


def test_failed_requests_are_counted_and_their_problem_is_printed(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = Script()
    # The first request, the warm-up, then the two requests of the run.
    worker.script = Script(rotation=(complete, complete, complete, Script(cut_after=2)))
    assert bench(gateway_with_worker, "--requests", "2") == 0
    output = capsys.readouterr()
    assert ["Failed", "requests:", "1"] in [line.split() for line in output.out.splitlines()]
    assert "paceline: failed: broke off:" in output.err


def test_an_interrupted_sweep_prints_and_writes_its_completed_runs(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    requests_of_one_level = 1 + 1 + 2
    hanging = [Script(hang=True)] * 100
    worker.script = Script(rotation=(*[DRAFTED] * requests_of_one_level, *hanging))
    record = tmp_path / "run.json"
    command = ("bench", "--url", gateway_with_worker.url, "--concurrency", "1,2", "--requests", "2")
    with PacelineFork([*command, "--json", str(record)], **PIPES, env=os.environ) as process:
        try:
            enough = requests_of_one_level + 1
            wait_until(lambda: len(worker.requests) >= enough, within_s=60)
            process.send_signal(signal.SIGINT)
            printed, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "")
    assert printed.count("Serving Benchmark Result") == 1
    assert [run["max_concurrency"] for run in json.loads(record.read_text())["runs"]] == [1]


def test_without_drafts_no_speculative_block_is_printed(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    events = (chunk({"content": "one"}), chunk({}, "stop"), event(LAST_CHUNK), DONE)
    worker.script = Script(events=events)
    assert bench(gateway_with_worker, "--requests", "2", "--rate", "100") == 0
    printed = capsys.readouterr().out
    assert "Request rate configured (RPS):" in printed
    assert "Speculative Decoding" not in printed


def test_prompts_of_a_file_are_sent(gateway_with_worker, worker, tmp_path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    system = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Two?"}]
    lines = ({"prompt": "One?", "max_tokens": 9}, {"messages": system})
    prompts.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--prompts", str(prompts), "--requests", "2", "--body", '{"top_p": 0.5}')
    assert bench(gateway_with_worker, *arguments) == 0
    bodies = [received.body for received in worker.requests[-2:]]
    lengths = {body["messages"][-1]["content"]: body["max_tokens"] for body in bodies}
    assert lengths == {"One?": 9, "Two?": 256}
    assert {body["top_p"] for body in bodies} == {0.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://127.0.0.1:9"), "nothing answers at http://127.0.0.1:9"),
        (("--url", "nonsense"), "'nonsense' is not a URL"),
        (("--model", "gpt-99"), "does not answer: 404"),
        (("--prompts", "none.jsonl"), "none.jsonl cannot be read"),
    ],
)
def test_an_unusable_endpoint_or_file_is_reported_in_one_message(
    module_gateway: RunningGateway, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        bench(module_gateway, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "no/such/folder/run.json"), "no/such/folder/run.json cannot be written"),
        (("--json", "/"), "/ cannot be written"),
        (("--concurrency", "1,0"), "'0' is not a number above 0"),
        (("--rate", "1", "--concurrency", "2"), "not allowed with"),
        (("--body", "[]"), "must be a JSON object"),
    ],
)
def test_an_invalid_option_is_rejected(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert message in capsys.readouterr().err
