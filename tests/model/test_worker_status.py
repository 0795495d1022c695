"""The status of a worker is one snapshot, and its counts are the sums of its responses."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.protocol import READY_PREFIX, Speculation, WorkerReport
from tests.support.scripted_engine import ScriptedEngine, make_worker
from tests.support.served_engine import ServedWorker
from tests.support.worker_process import RunningWorker
from workers.engine.types import EngineState
from workers.model_source import resolve_model
from workers.server.start import announce

QUESTION = {"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 12}


async def test_status_increases_by_exactly_the_counts_of_the_responses(real_worker) -> None:
    async with httpx.AsyncClient(base_url=real_worker.url, timeout=60) as client:
        before = (await client.get("/v1/status")).json()
        responses = await asyncio.gather(
            *(
                client.post(
                    "/v1/chat/completions",
                    json={"model": real_worker.model, "temperature": n % 2, **QUESTION},
                )
                for n in range(6)
            )
        )
        after = (await client.get("/v1/status")).json()
    bodies = [response.json() for response in responses]
    for name in ("prompt_tokens", "completion_tokens"):
        increase = sum(
            after["lanes"][lane][name] - before["lanes"][lane][name] for lane in real_worker.lanes
        )
        assert increase == sum(body["usage"][name] for body in bodies)
    speculations = [body["metrics"]["speculative_decoding"] for body in bodies if "metrics" in body]
    assert len(speculations) == 6, "sampled requests are drafted for too"
    for total, metric in (
        ("drafts", "num_spec_steps"),
        ("attempted", "num_draft_tokens"),
        ("accepted", "num_accepted_draft_tokens"),
    ):
        increase = after["mtp"][total] - before["mtp"].get(total, 0)
        assert increase == sum(metrics[metric] for metrics in speculations)
    mtp = after["mtp"]
    assert mtp["attempted"] == mtp["accepted"] + mtp["rejected"] + mtp["errors"]


async def test_status_contains_lanes_memory_and_a_valid_report(real_worker) -> None:
    async with httpx.AsyncClient(base_url=real_worker.url, timeout=60) as client:
        status = (await client.get("/v1/status")).json()
    report = WorkerReport.model_validate(status["report"])
    assert (status["worker_id"], status["boot_id"]) == (report.worker_id, report.boot_id)
    assert status["worker_id"] == real_worker.worker_id == "session"
    assert report.url == real_worker.url
    assert report.sees_pictures
    assert report.constrains_calls, "a grammar knows the format of the demo's calls"
    assert report.system_inside is not None
    assert set(status["lanes"]) == {"text-mtp", "vlm"}
    assert status["lanes"]["text-mtp"]["mtp"]["requested_draft_tokens"] == 2
    # One copy of the weights for both lanes: two would not fit into this.
    assert status["memory"]["weights_bytes"] < status["memory"]["bytes"]
    assert status["ready"] is True
    assert 0 < report.memory_bytes < report.memory_limit_bytes
    assert report.prefix_count >= len(report.prefixes)


async def test_metrics_contain_the_vllm_counters_once_and_match_the_status(real_worker) -> None:
    async with httpx.AsyncClient(base_url=real_worker.url, timeout=60) as client:
        await client.post(
            "/v1/chat/completions", json={"model": real_worker.model, "temperature": 0, **QUESTION}
        )
        text = (await client.get("/metrics")).text
        report = WorkerReport.model_validate((await client.get("/v1/status")).json()["report"])
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    total = sum((lane.speculation for lane in report.lanes), Speculation())
    for name, count in (
        ("num_drafts", total.steps),
        ("num_draft_tokens", total.drafted),
        ("num_accepted_tokens", total.accepted),
    ):
        (sample,) = samples[f"vllm:spec_decode_{name}_total"]
        assert (sample.labels, sample.value) == ({"model_name": real_worker.model}, count)
    per_position = samples["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    # The worker drafts two tokens by itself; another test may have asked it for more.
    positions = [str(at) for at in range(max(2, total.num_spec_tokens))]
    assert [sample.labels["position"] for sample in per_position] == positions
    assert tuple(sample.value for sample in per_position) == total.accepted_per_position
    requests = {s.labels["lane"]: s.value for s in samples["paceline_worker_requests_total"]}
    assert requests == {lane.name: lane.requests for lane in report.lanes}


async def test_prefix_cache_hits_are_counted_and_reported_in_the_response(real_worker) -> None:
    system = {"role": "system", "content": "You sell boats. " + "The blue boat is warm. " * 20}
    body = {"model": real_worker.model, "temperature": 0, "max_tokens": 8, "draft_tokens": 2}
    async with httpx.AsyncClient(base_url=real_worker.url, timeout=60) as client:
        before = (await client.get("/v1/status")).json()
        responses = await asyncio.gather(
            *(
                client.post(
                    "/v1/chat/completions",
                    json={**body, "messages": [system, {"role": "user", "content": f"Hello {n}"}]},
                )
                for n in range(4)
            )
        )
        after = (await client.get("/v1/status")).json()
        metrics = (await client.get("/metrics")).text
    cached = [
        response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for response in responses
    ]
    assert cached.count(0) == 1, "of concurrent requests, only one reads the prompt"
    assert len(set(cached)) == 2
    lane, earlier = (status["lanes"]["text-mtp"]["prefix"] for status in (after, before))
    increase = {name: lane[name] - earlier[name] for name in ("hits", "misses", "cached_tokens")}
    assert increase == {"hits": 3, "misses": 1, "cached_tokens": sum(cached)}
    kinds, before_kinds = lane["tokens_by_kind"], earlier["tokens_by_kind"]
    assert kinds["system"] - before_kinds.get("system", 0) == sum(cached)
    drafts = [response.json()["metrics"]["speculative_decoding"] for response in responses]
    assert all(counts["num_draft_tokens"] > 0 for counts in drafts), "with speculation on"
    assert after["memory"]["prefix_cache_bytes"] > 0  # other tests may have filled it
    assert (
        f'paceline_worker_prefix_hits_total{{lane="text-mtp",model_name="{real_worker.model}"}}'
        in (metrics)
    )
    assert "paceline_worker_prefix_cache_bytes{" in metrics


async def test_models_lists_the_served_model(real_worker: RunningWorker) -> None:
    async with httpx.AsyncClient(base_url=real_worker.url, timeout=60) as client:
        models = (await client.get("/v1/models")).json()["data"]
        model = (await client.get(f"/v1/models/{real_worker.model}")).json()
        unknown = await client.get("/v1/models/some/other")
    assert models == [model]
    assert model["id"] == real_worker.model
    assert unknown.status_code == 404


def test_a_worker_without_a_gateway_says_so_and_what_it_serves_before_its_ready_line(
    real_worker: ServedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(real_worker.worker, resolve_model(""), gateway_url="")
    *lines, last, ready = capsys.readouterr().out.splitlines()
    assert ready.startswith(READY_PREFIX)
    (toy,) = (line for line in lines if "toy model" in line)
    assert "--model" in toy
    (alone,) = (line for line in lines if "Not joined to any gateway" in line)
    assert "--join http://GATEWAY:8000, and with its token in PACELINE_JOIN_TOKEN" in alone
    assert real_worker.model in last
    assert "text-mtp and vlm share one copy of the weights" in last
    assert "MB in use" in last
    assert "It drafts 2 tokens ahead." in last


@pytest.mark.parametrize("count", [0, 64, 65, 320, 321, 3000])
def test_successive_reports_confirm_all_keys(count: int) -> None:
    keys = tuple(f"{at:04}" for at in range(count))
    reports = []
    for turn in range(20):
        engine = ScriptedEngine(kept=EngineState(prefixes=keys[turn:] + keys[:turn]))
        now_s = 1e6 + 2.0 * turn
        reports.append(replace(make_worker(engine), clock=partial(float, now_s)).report())
    assert {key for one in reports for key in (*one.prefixes, *one.held_prefixes)} == set(keys)
    assert max(len(one.held_prefixes) for one in reports) == min(max(count - 64, 0), 256)
