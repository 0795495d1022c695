"""What lanes did, added up over workers and over the boots of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway import status_figures as told
from gateway.fleet.worker import Member
from policies.pools import Pool
from workers.protocol import LaneReport, PrefixCounts, SavedTime, WorkerReport, mtp_block


def as_of_now(
    reports: Iterable[WorkerReport], members: Mapping[str, Member]
) -> tuple[WorkerReport, ...]:
    """Leave of boots that are over their counts alone, and put them before those that live."""
    live, over = [], []
    for report in reports:
        member = members.get(report.worker_id)
        if member is not None and member.report.boot_id == report.boot_id:
            live.append(report)
        else:
            lanes = tuple(_over(lane) for lane in report.lanes)
            over.append(report.model_copy(update={"lanes": lanes}))
    return (*over, *live)


def _over(lane: LaneReport) -> LaneReport:
    nothing = ("slots", "running", "waiting", "requested_draft_tokens", "effective_draft_tokens")
    return lane.model_copy(update=dict.fromkeys(nothing, 0))


def lanes_of(reports: Iterable[WorkerReport]) -> tuple[LaneReport, ...]:
    """List the lanes of these boots."""
    return tuple(lane for report in reports for lane in report.lanes)


def lanes_of_pool(
    name: str,
    pool: Pool,
    reports: Iterable[WorkerReport],
    members: Mapping[str, Member],
) -> tuple[LaneReport, ...]:
    """List the lanes of a pool, those of workers that are gone too."""
    models = {worker_id: member.models for worker_id, member in members.items()}
    return tuple(
        lane
        for report in reports
        if pool.takes(report.labels, models.get(report.worker_id, (report.model,)))
        for lane in report.lanes
        if lane.name == name or lane.name in pool.lanes
    )


def mtp_of(lanes: tuple[LaneReport, ...]) -> told.Mtp:
    """Tell what drafting did on these lanes."""
    block = mtp_block(lanes)
    if not block["enabled"]:
        return told.MtpOff(enabled=False)
    return told.MtpOn.model_validate(block)


def saved_by(lanes: Iterable[LaneReport]) -> told.Saved:
    """Tell what drafting and kept system prompts saved on these lanes."""
    lanes = tuple(lanes)
    time = sum((lane.saved for lane in lanes), SavedTime())
    return told.Saved(
        decode_steps=sum(lane.speculation.accepted for lane in lanes),
        decode_s=time.decode_ms / 1000,
        prompt_tokens=sum(lane.prefix.cached_tokens for lane in lanes),
        prompt_s=time.prompt_ms / 1000,
    )


def prefix_of(lanes: Iterable[LaneReport]) -> told.LanePrefix:
    """Tell what was found of system prompts on these lanes."""
    total = sum((lane.prefix for lane in lanes), PrefixCounts())
    return told.LanePrefix(hits=total.hits, misses=total.misses, cached_tokens=total.cached_tokens)
