"""The alarm for workers that draft or reuse earlier tokens, and never both."""

from typing import Any

import pytest

from gateway.auth.usage_store import UsageStore
from gateway.routing.prefix_affinity import EVICTED, ISOLATED
from gateway.routing.select import Candidate
from gateway.state.recent_errors import RecentErrors
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.speculation_and_reuse import Alarm, alarm_of
from gateway.telemetry.stats import SnapshotHistory
from gateway.types import Drafts, Outcome, Usage
from paceline.request.profile import Endpoint, RequestProfile
from tests.support.fake_clock import FakeClock
from tests.support.memory_records import MemoryRecords

CANDIDATE = Candidate("text-mtp", "text-mtp", "studio", "eligible", 0.0, cached_tokens=900)
DRAFTED, REUSED = Drafts(5, 10, 6, (1, 2, 2)), Usage(1000, 40, 900)
NO_DRAFTS, READ_AGAIN = Drafts(0, 0, 0, ()), Usage(1000, 40, 0)


def record(**changes: Any) -> RequestRecord:
    """Return a request that could draft and reuse, and did both."""
    profile = RequestProfile(endpoint=Endpoint.CHAT, model="demo")
    values = {"profile": profile, "candidate": CANDIDATE}
    return RequestRecord("r", **{**values, "usage": REUSED, "drafts": DRAFTED, **changes})


class Fleet:
    """The accounting of one gateway, with its history."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        usage_store = UsageStore(MemoryRecords(), lambda: 0.0, "life")
        self.accounting = Accounting(usage_store, RecentErrors(), None, lambda: 0.0)
        self.history = SnapshotHistory(
            self.accounting.lane_totals, self.accounting.outcomes, self.clock
        )

    def finish(self, times: int, **changes: Any) -> None:
        for _ in range(times):
            self.accounting.account(record(**changes))

    @property
    def alarm(self) -> Alarm:
        return alarm_of(self.history, self.history.take_snapshot())

    async def wait(self, seconds: float) -> None:
        for _ in range(int(seconds // 10)):
            self.clock.advance(10.0)
            await self.history.record()


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.mark.parametrize(
    ("changes", "had", "lacked", "result"),
    [
        ({"usage": READ_AGAIN}, "drafted", "reused earlier tokens", "drafted_only"),
        ({"drafts": NO_DRAFTS}, "reused earlier tokens", "drafted", "reused_only"),
    ],
)
def test_the_third_request_that_lost_one_of_the_two_raises_the_alarm(
    fleet: Fleet, changes: dict[str, Any], had: str, lacked: str, result: str
) -> None:
    fleet.finish(2, **changes)
    assert fleet.alarm.problem == ""
    fleet.finish(1, **changes)
    counts, problem = fleet.alarm
    assert problem == (
        f"On the worker studio, 3 requests of the last 10 minutes {had} and none {lacked}, though "
        "they could have done both."
    )
    assert counts == {"both": 0, "drafted_only": 0, "reused_only": 0, "neither": 0} | {result: 3}
    assert fleet.accounting.totals()["speculation_and_reuse", result] == 3


def test_one_request_with_both_ends_the_alarm_of_its_worker_alone(fleet: Fleet) -> None:
    laptop = CANDIDATE._replace(worker_id="laptop")
    fleet.finish(5, usage=READ_AGAIN)
    fleet.finish(5, usage=READ_AGAIN, candidate=laptop)
    fleet.finish(1)
    assert "laptop" in fleet.alarm.problem
    fleet.finish(1, candidate=laptop)
    assert fleet.alarm.problem == ""


async def test_the_alarm_ends_after_ten_minutes(fleet: Fleet) -> None:
    fleet.finish(3, usage=READ_AGAIN)
    await fleet.wait(600)
    assert fleet.alarm.problem
    await fleet.wait(10)
    assert fleet.alarm == Alarm({"both": 0, "drafted_only": 0, "reused_only": 0, "neither": 0}, "")


@pytest.mark.parametrize(
    "changes",
    [
        {"candidate": CANDIDATE._replace(cached_tokens=0)},
        {"candidate": CANDIDATE._replace(reason="mtp_not_paying")},
        {"candidate": None},
        {"outcome": Outcome.CLIENT_LEFT},
        {"usage": READ_AGAIN._replace(completion_tokens=1)},
        {"usage": READ_AGAIN._replace(cached_known=False)},
        {"drafts": None},
        {"profile": RequestProfile(Endpoint.CHAT, "demo", draft_tokens=0)},
    ],
)
def test_one_that_could_not_do_both_raises_no_alarm(fleet: Fleet, changes: dict[str, Any]) -> None:
    fleet.finish(9, **{"usage": READ_AGAIN, **changes})
    assert fleet.alarm.problem == ""
    assert sum(fleet.alarm.counts.values()) == 0


def test_why_turns_were_read_again_is_counted_unless_it_tells_of_other_teams(fleet: Fleet) -> None:
    for reason in (EVICTED, EVICTED, "changed at message 3", ISOLATED, ""):
        fleet.finish(1, missed_reuse=reason)
    counts = {key[1:]: n for key, n in fleet.accounting.totals().items() if key[0] == "not_reused"}
    assert counts == {(EVICTED,): 2, ("changed at message 3",): 1}
