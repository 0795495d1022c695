"""`paceline bench` on the real demo model, held to what the line itself counts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import httpx
import pytest

from gateway.cli import main
from gateway.loadgen.client import open_endpoint, read_answer
from gateway.loadgen.drafts import Drafts
from gateway.loadgen.prompts import built_in_prompts, sample_prompts
from gateway.loadgen.runner import Level, send_all
from tests.support.paceline_process import UpProcess


async def test_the_drafts_of_the_answers_are_those_that_the_line_counted(up: UpProcess) -> None:
    prompts = sample_prompts(built_in_prompts(), 6, Random(1))
    async with open_endpoint(up.url, fields={"temperature": 0, "max_tokens": 48}) as endpoint:
        before = await endpoint.read_counters()
        heard = await send_all(
            endpoint, prompts, Level(concurrency=3), random=Random(1), on_end=lambda _: None
        )
        after = await endpoint.read_counters()
    answers = [read_answer(each) for each in heard]
    assert [answer.problem for answer in answers] == [""] * 6
    told = sum((answer.drafts for answer in answers if answer.drafts), Drafts())
    assert before is not None
    assert after is not None
    assert told == after.since(before)
    assert told.steps > 0
    assert all(answer.tokens_reported and answer.output_tokens for answer in answers)


def test_a_bench_of_the_demo_model_adds_up(
    up: UpProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = f"{up.url}/v1/status"
    routed = httpx.get(status).json()["decisions"]["total"]
    record = tmp_path / "run.json"
    load = ("--requests", "4", "--max-tokens", "32", "--concurrency", "2")
    assert main(["bench", "--url", up.url, *load, "--json", str(record)]) == 0
    (told,) = json.loads(record.read_text())["runs"]
    assert (told["completed"], told["failed"]) == (4, 0)
    assert 4 <= told["total_output_tokens"] <= 4 * 32
    accepted = told["spec_decode_accepted_tokens"]
    assert 0 < accepted <= told["spec_decode_draft_tokens"]
    positions = told["spec_decode_per_position_acceptance_rates"]
    assert round(sum(positions) * told["spec_decode_num_drafts"]) == accepted
    assert "Speculative Decoding" in capsys.readouterr().out
    tried_and_warmed_up = 1 + 2
    assert httpx.get(status).json()["decisions"]["total"] == routed + tried_and_warmed_up + 4
