"""SpecPrefill of long prompts: flags and fields reach the engine, and the response reports it."""

from dataclasses import replace

import pytest

from tests.support.scripted_engine import ScriptedEngine, text_events, worker_client
from workers.engine.types import Finished, SpecPrefillOptions


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
    async with worker_client(engine) as client:
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
