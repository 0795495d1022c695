"""SpecPrefill of long prompts: flags and fields reach the engine, and the response reports it."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_worker, text_events
from tests.support.worker_process import running_worker
from workers.demo import CHECKPOINT
from workers.engine.types import Finished, SpecPrefillOptions

LONG = "The red fox sees the old tree. " * 80 + "What does the fox see?"


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, SpecPrefillOptions()),
        ({"specprefill": False}, SpecPrefillOptions(sparse=False)),
        (
            {"specprefill": True, "specprefill_keep_pct": 0.5},
            SpecPrefillOptions(sparse=True, keep_share=0.5),
        ),
    ],
)
async def test_spec_prefill_fields_reach_the_engine_and_usage_reports_skipped_tokens(
    fields: dict[str, object], options: SpecPrefillOptions
) -> None:
    *texts, end = text_events("read")
    assert isinstance(end, Finished)
    skipped = 5 if options.sparse else 0
    engine = ScriptedEngine(
        [*texts, replace(end, usage=replace(end.usage, skipped_tokens=skipped))]
    )
    async with (
        serve_worker(make_worker(engine)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], **fields}
        response = (await client.post("/v1/chat/completions", json=body)).json()

    assert engine.generations[0].spec_prefill == options
    details = response["usage"]["prompt_tokens_details"]
    assert details == {
        "cached_tokens": 3,
        "cache_write_tokens": 0,
        **({"skipped_tokens": 5} if skipped else {}),
    }
    assert response["usage"]["prompt_tokens"] == 7


def test_a_worker_with_a_draft_model_reads_a_long_prompt_sparsely_and_counts_it() -> None:
    flags = ("--spec-prefill", str(CHECKPOINT), "--spec-prefill-threshold", "300")
    with (
        running_worker(*flags) as worker,
        httpx.Client(base_url=worker.url, timeout=60) as client,
    ):
        assert "From 300 tokens on, 30% of a prompt are read" in worker.start_lines[-1]
        body = {
            "model": worker.model,
            "messages": [{"role": "user", "content": LONG}],
            "temperature": 0,
            "max_tokens": 4,
        }
        sparse = client.post("/v1/chat/completions", json=body).json()["usage"]
        full = client.post("/v1/chat/completions", json=body | {"specprefill": False})
        report = client.get("/v1/status").json()["lanes"]["text-mtp"]["spec_prefill"]
        metrics = client.get("/metrics").text

    skipped = sparse["prompt_tokens_details"]["skipped_tokens"]
    assert sparse["prompt_tokens"] == full.json()["usage"]["prompt_tokens"] > skipped > 200
    assert report == {
        "prompts": 1,
        "scored_tokens": sparse["prompt_tokens"],
        "selected_tokens": sparse["prompt_tokens"] - skipped,
        "full_prefills": {"switched_off": 1},
    }
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.labels.get("lane") == "text-mtp"
    }
    assert values["paceline_worker_spec_prefill_prompts_total"] == 1
    assert values["paceline_worker_spec_prefill_full_prefills_total"] == 1
