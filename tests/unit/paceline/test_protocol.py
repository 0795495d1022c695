"""Bounds of the report of a worker."""

import time
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.state.counters import sum_reports
from paceline.protocol import (
    MAX_COUNT,
    PROTOCOL,
    LaneReport,
    Speculation,
    StartProgress,
    WorkerReport,
    mtp_block,
    speaks,
)

REPORT: dict[str, Any] = {
    "worker_id": "studio",
    "boot_id": "b1",
    "url": "http://mac:9200",
    "model": "Qwen/Qwen3.5-4B",
    "context_tokens": 4096,
    "lanes": [{"name": "vlm"}],
}


@pytest.mark.parametrize(
    ("start", "description"),
    [
        ({"stage": "weights"}, "loading the weights"),
        ({"stage": "kernels", "done": 1, "total": 3}, "compiling kernels, 1 of 3"),
        (
            {"stage": "download", "done": 12e8, "total": 87e8},
            "downloading the model, 1.2 of 8.7 GB",
        ),
        ({"stage": "of-a-newer-worker", "total": 2}, "of-a-newer-worker, 0 of 2"),
    ],
)
def test_a_start_is_told_with_its_stage_and_amount(start: dict[str, Any], description: str) -> None:
    assert StartProgress.model_validate(start).description == description


def lane(**fields: Any) -> dict[str, Any]:
    return {"lanes": [{"name": "vlm", **fields}]}


def test_a_report_of_a_newer_worker_may_have_further_fields() -> None:
    """One step newer and one step older work, so that a fleet is upgraded one by one."""
    newer = {**REPORT, "protocol": PROTOCOL + 1, "more": 1, **lane(more=1, prefix={"more": 1})}
    assert WorkerReport.model_validate(newer).protocol == PROTOCOL + 1
    assert WorkerReport.model_validate(REPORT).protocol == 1, "that of reports without a number"
    assert [step for step in range(-3, 4) if speaks(PROTOCOL + step)] == [-1, 0, 1]


HUGE = 10**400
INVALID: tuple[dict[str, Any], ...] = (
    *({name: HUGE} for name in ("context_tokens", "memory_bytes", "prefix_count")),
    {"memory_limit_bytes": MAX_COUNT + 1},
    {"prefix_cache_bytes": -1},
    *({"worker_id": name} for name in ("", "a" * 65, "a b", "a\n", "\x1b[2J")),
    *({"boot_id": name} for name in ("", "a" * 65, "a/b", "a\n", "earlier:", "earlier:\x1b[2J")),
    *({"model": name} for name in ("", "a" * 256, "\x1b[2J", "\x9b2J", "a\nb", "\u202etxt")),
    *({"start": {"stage": name}} for name in ("", "a" * 65, "a b", "\x1b[2J")),
    {"start": {"stage": "kernels", "done": -1}},
    {"start": {"stage": "kernels", "elapsed_s": float("nan")}},
    {"labels": ["a"] * 65},
    {"labels": ["\x1b"]},
    {"prefixes": ["a" * 129]},
    {"prefixes": ["\x1b[2J"]},
    {"lanes": [{"name": f"lane-{number}"} for number in range(17)]},
    {"lanes": [{"name": "vlm"}, {"name": "vlm"}]},
    {"lanes": [{"name": "\x1b[2J"}]},
    *(lane(**{name: HUGE}) for name in ("running", "waiting", "slots", "requests")),
    *(lane(**{name: 65}) for name in ("requested_draft_tokens", "effective_draft_tokens")),
    *(
        lane(prefill_tokens_per_s=speed)
        for speed in (float("inf"), float("-inf"), float("nan"), -1.0, 1e300)
    ),
    lane(draft_tokens_by_rows=[1] * 257),
    lane(speculation={"steps": HUGE}),
    lane(speculation={"num_spec_tokens": 65}),
    lane(speculation={"steps": 66, "histogram": [1] * 66}),
    lane(speculation={"drafted": 1, "drafted_by_source": {"head": 1, "lookup": 1}}),
    lane(speculation={"drafted": 2, "accepted": 1, "accepted_by_source": {"lookup": 2}}),
    lane(speculation={"drafted": 1, "drafted_by_source": {"a b": 1}}),
    lane(bypass_counts={f"reason-{number}": 1 for number in range(65)}),
    lane(bypass_counts={"\x1b[2J": 1}),
    lane(bypass_counts={"media": HUGE}),
    lane(spec_prefill={"full_prefills": {"a" * 65: 1}}),
    lane(prefix={"hits": HUGE}),
    *(lane(time_saved={"decode_ms": ms}) for ms in (HUGE, -HUGE)),
)


@pytest.mark.parametrize("change", INVALID, ids=lambda change: repr(change)[:40])
def test_c5_a_report_beyond_any_bound_is_invalid(change: dict[str, Any]) -> None:
    WorkerReport.model_validate(REPORT)
    with pytest.raises(ValidationError):
        WorkerReport.model_validate({**REPORT, **change})


@pytest.mark.parametrize(
    "url",
    [
        *("", "mac:9200", "ftp://mac", "http://", "http://mac:99999", "http://mac:0", "http://["),
        *("http://a@mac", "http://mac?x", "http://mac#x", "http://mac\r\nx: y", "http://mäc"),
        "http://" + "a" * 3000,
    ],
)
def test_l5_a_url_that_no_request_can_be_sent_to_is_invalid(url: str) -> None:
    with pytest.raises(ValidationError):
        WorkerReport.model_validate({**REPORT, "url": url})


@pytest.mark.parametrize("model", ["demo", "Mein Modell (größer) 4-bit", "千问/千问3", "a" * 255])
def test_the_name_of_any_folder_is_the_name_of_a_model(model: str) -> None:
    assert WorkerReport.model_validate({**REPORT, "model": model}).model == model


def test_a_speed_too_slow_to_divide_by_counts_as_no_measurement() -> None:
    assert LaneReport(name="vlm", prefill_tokens_per_s=5e-324).prefill_tokens_per_s == 0.0


def test_c5_acceptance_by_position_takes_linear_time() -> None:
    counts = Speculation.model_construct(histogram=(1,) * 200_000)
    begun_s = time.process_time()
    assert counts.accepted_per_position[:2] == (199_999, 199_998)
    assert time.process_time() - begun_s < 1.0
    assert Speculation(steps=7, histogram=(4, 2, 1)).accepted_per_position == (3, 1)
    assert Speculation().accepted_per_position == ()


def test_drafts_add_up_by_source_also_with_a_worker_that_does_not_tell() -> None:
    by_source: Any = {
        "drafted_by_source": {"head": 2, "lookup": 3},
        "accepted_by_source": {"lookup": 3},
    }
    one = Speculation(drafted=5, accepted=3, **by_source)
    total = one + one + Speculation(drafted=7, accepted=7)
    lookup = {"attempted": 6, "accepted": 6}
    assert total.by_source == {"head": {"attempted": 4, "accepted": 0}, "lookup": lookup}
    assert (total.drafted, total.accepted) == (17, 13)


def report_with_counts(count: int, boot_id: str = "b1") -> WorkerReport:
    counts = {"steps": count, "drafted": count, "accepted": count, "histogram": [0, count]}
    fields = lane(requests=count, speculation=counts, mtp_enabled=True, prefix={"hits": count})
    return WorkerReport.model_validate({**REPORT, **fields, "boot_id": boot_id})


def test_c5_the_largest_counts_add_up_in_a_status() -> None:
    lanes = report_with_counts(MAX_COUNT).lanes * 3
    total = lanes[0] + lanes[1] + lanes[2]
    assert (total.requests, total.prefix.hits) == (3 * MAX_COUNT, 3 * MAX_COUNT)
    assert mtp_block(lanes)["accepted"] == 3 * MAX_COUNT


def test_c5_a_sum_of_boots_stays_a_valid_report() -> None:
    earlier = sum_reports(None, report_with_counts(MAX_COUNT - 1), "earlier:demo", "mac")
    assert sum_reports(earlier, report_with_counts(2, "b2"), "earlier:demo", "mac") == earlier
    summed = sum_reports(earlier, report_with_counts(1, "b2"), "earlier:demo", "mac")
    assert summed.lanes[0].requests == MAX_COUNT
    assert WorkerReport.model_validate_json(summed.model_dump_json()) == summed
