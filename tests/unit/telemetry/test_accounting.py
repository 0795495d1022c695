"""The counts of requests, whose labels are bounded, whatever names workers report."""

import pytest

from gateway.auth.usage_store import UsageStore
from gateway.routing.prefix_affinity import EVICTED, ISOLATED
from gateway.routing.select import Candidate
from gateway.state.recent_errors import RecentErrors
from gateway.telemetry import accounting
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Usage
from paceline.request.profile import Endpoint, RequestProfile
from tests.support.memory_records import MemoryRecords


def record(worker_id: str, model: str) -> RequestRecord:
    return RequestRecord(
        "r",
        profile=RequestProfile(endpoint=Endpoint.CHAT, model=model, text_chars=1),
        candidate=Candidate("vlm", "vlm", worker_id, "policy", 0.0),
        usage=Usage(2, 3, 0),
    )


def accounting_of() -> Accounting:
    usage_store = UsageStore(MemoryRecords(), lambda: 0.0, "life")
    return Accounting(usage_store, RecentErrors(), None, lambda: 0.0)


def test_c5_endless_workers_and_models_have_bounded_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "_LANES_LIMIT", 3)
    accounts = accounting_of()
    for number in range(20):
        accounts.account(record(f"mac-{number}", f"model-{number}"))
    accounts.account(record("mac-0", "model-0"))
    lanes = accounts.lane_stats()
    assert [key.worker_id for key in lanes] == ["mac-0", "mac-1", "mac-2", "other"]
    assert [stats.requests for stats in lanes.values()] == [2, 1, 1, 17]
    totals = accounts.totals()
    assert totals["tokens", "other", "completion"] == 17 * 3
    assert len([key for key in totals if key[0] == "tokens"]) == 4 * 3


def test_why_turns_were_read_again_is_counted_unless_it_tells_of_other_teams() -> None:
    accounts = accounting_of()
    for reason in (EVICTED, EVICTED, "changed at message 3", ISOLATED, ""):
        accounts.account(record("mac", "demo")._replace(missed_reuse=reason))
    counts = {key[1:]: n for key, n in accounts.totals().items() if key[0] == "not_reused"}
    assert counts == {(EVICTED,): 2, ("changed at message 3",): 1}
