"""`paceline bench` on the demo model; its results equal the counters of the worker."""

import json
from random import Random

import httpx

from gateway.cli import main
from gateway.loadgen.client import open_endpoint, read_answer
from gateway.loadgen.drafts import Drafts
from gateway.loadgen.prompts import built_in_prompts, sample_prompts
from gateway.loadgen.runner import Level, send_all


async def test_the_drafts_of_the_answers_equal_the_counters_of_the_gateway(demo) -> None:
    prompts = sample_prompts(built_in_prompts(), 6, Random(1))
    async with open_endpoint(demo.url, fields={"temperature": 0, "max_tokens": 48}) as endpoint:
        before = await endpoint.read_counters()
        responses = await send_all(
            endpoint, prompts, Level(concurrency=3), random=Random(1), on_end=lambda _: None
        )
        after = await endpoint.read_counters()
    answers = [read_answer(response) for response in responses]
    assert [answer.problem for answer in answers] == [""] * 6
    drafts = sum((answer.drafts for answer in answers if answer.drafts), Drafts())
    assert before is not None
    assert after is not None
    # Another test may have asked the worker for longer drafts: it counts their positions too.
    assert drafts + Drafts(per_position=(0,) * len(after.per_position)) == after.since(before)
    assert drafts.steps > 0
    assert all(answer.tokens_reported and answer.output_tokens for answer in answers)


def test_the_results_of_a_bench_are_consistent(demo, tmp_path, capsys) -> None:
    status = f"{demo.url}/v1/status"
    routed = httpx.get(status, timeout=60).json()["decisions"]["total"]
    record = tmp_path / "run.json"
    load = ("--requests", "4", "--max-tokens", "32", "--concurrency", "2")
    assert main(["bench", "--url", demo.url, *load, "--json", str(record)]) == 0
    (result,) = json.loads(record.read_text())["runs"]
    assert (result["completed"], result["failed"]) == (4, 0)
    assert 4 <= result["total_output_tokens"] <= 4 * 32
    accepted = result["spec_decode_accepted_tokens"]
    assert 0 < accepted <= result["spec_decode_draft_tokens"]
    positions = result["spec_decode_per_position_acceptance_rates"]
    assert round(sum(positions) * result["spec_decode_num_drafts"]) == accepted
    assert "Speculative Decoding" in capsys.readouterr().out
    extra_requests = 1 + 2
    assert httpx.get(status, timeout=60).json()["decisions"]["total"] == routed + extra_requests + 4
