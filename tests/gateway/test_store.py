"""What the store keeps of boots and counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.store import MemoryStore
from tests.gateway.fake_worker import FakeWorker, lane_report, speculation
from workers.adapters.report import LaneReport, WorkerReport


def report(boot_id: str, requests: int, model: str = "demo") -> WorkerReport:
    lane = lane_report(
        "text-mtp",
        requests=requests,
        completion_tokens=5 * requests,
        bypass_counts={"media": requests},
        speculation=speculation(steps=requests, one=0, two=requests),
    )
    fake = FakeWorker(boot_id=boot_id, model=model)
    fake.socket.close()
    return fake.report(lanes=[lane.model_dump()])


async def test_an_overtaken_report_does_not_turn_counts_back() -> None:
    store = MemoryStore()
    await store.keep_report(report("a", 5))
    await store.keep_report(report("a", 3))
    assert [one.lanes[0].requests for one in await store.reports()] == [5]


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["demo", "other"])), max_size=60))
async def test_sums_over_any_number_of_boots_are_exact_and_memory_is_bounded(
    lives: list[tuple[int, str]],
) -> None:
    store = MemoryStore()
    for boot, (requests, model) in enumerate(lives):
        await store.keep_report(report(f"boot-{boot}", requests, model))
    kept = await store.reports()
    for model in ("demo", "other"):
        lanes = [one.lanes[0] for one in kept if one.model == model]
        expected = sum(requests for requests, named in lives if named == model)
        assert sum(lane.requests for lane in lanes) == expected
        assert sum(lane.speculation.accepted for lane in lanes) == 2 * expected
        assert sum(lane.bypass_counts.get("media", 0) for lane in lanes) == expected
    assert len(kept) <= 18


def test_every_field_of_a_lane_either_adds_up_or_is_of_the_moment() -> None:
    """A count that somebody adds to the report must not get lost between two boots."""
    of_the_moment = {
        "name",
        "running",
        "waiting",
        "slots",
        "unread_tokens",
        "read_tokens_s",
        "write_tokens_s",
        "mtp_enabled",
        "requested_draft_tokens",
        "effective_draft_tokens",
        "draft_tokens_by_rows",
        "head_healthy",
    }
    added = {
        "speculation",
        "bypass_counts",
        "spec_prefill",
        "prefix",
        "saved",
        "requests",
        "prompt_tokens",
        "completion_tokens",
    }
    assert set(LaneReport.model_fields) == of_the_moment | added


async def test_counts_add_up() -> None:
    store = MemoryStore()
    store.count({("outcomes", "completed"): 1, ("retries",): 2})
    store.count({("outcomes", "completed"): 1})
    assert await store.counts() == {("outcomes", "completed"): 2, ("retries",): 2}
