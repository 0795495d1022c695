"""Usage by key and team: exact sums over restarts, reported by day."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.assembly import TIMING
from gateway.auth.rate_limits import DAY_S
from gateway.auth.usage import RETENTION_DAYS, UsageRow, compacted, date_of, rows_by_day
from gateway.auth.usage_store import UsageStore
from gateway.errors import RecordsUnwritable
from gateway.telemetry.recent_usage import RecentUsage
from gateway.types import Caller, Spent, Usage
from tests.support.memory_records import MemoryRecords
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    begun,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import Script, ScriptedWorker

TODAY = 20_000
ANN = Caller(client="key-a", key="key-a", team="lab")
BOB = Caller(client="key-b", key="key-b")

ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(("life-1", "life-2", "life-3")),
        st.sampled_from((ANN, BOB)),
        st.integers(0, 9),
        st.integers(0, RETENTION_DAYS + 3),
    ),
    max_size=30,
)


class SwitchableRecords(MemoryRecords):
    """Records that count writes, and fail while they are unwritable."""

    writable = True
    writes = 0

    async def replace(self, kind: str, name: str, text: str) -> None:
        if not self.writable:
            raise RecordsUnwritable
        self.writes += 1
        self.texts.setdefault(kind, {})[name] = text


def usage_store(process: str, records: MemoryRecords | None = None) -> UsageStore:
    """Return the usage of one process on the day `TODAY`."""
    return UsageStore(records or MemoryRecords(), lambda: TODAY * DAY_S, process)


def stored_records(entries: list[tuple[str, Caller, int, int]]) -> dict[str, str]:
    """Return the usage records that all processes store for requests of so many days ago."""
    ledgers = {process: usage_store(process) for process in ("life-1", "life-2", "life-3")}
    for process, caller, tokens, days_ago in entries:
        at_unix_s = (TODAY - days_ago) * DAY_S
        ledgers[process].add(caller, Usage(tokens, 1, 0), Spent(1, tokens + 1), at_unix_s)
    return {name: text for ledger in ledgers.values() for name, text in ledger.records().items()}


def totals(texts: dict[str, str]) -> dict[tuple[int, str], tuple[int, int]]:
    """Return requests and tokens by day and key, for days within the retention."""
    return {
        (day, row.key): (row.requests, row.tokens)
        for day, rows in rows_by_day(texts).items()
        for row in rows
        if day > TODAY - RETENTION_DAYS
    }


@settings(max_examples=40)
@given(ENTRIES)
def test_usage_of_all_processes_adds_up(entries: list[tuple[str, Caller, int, int]]) -> None:
    sums: dict[tuple[int, str], tuple[int, int]] = {}
    for _, caller, tokens, days_ago in entries:
        if days_ago < RETENTION_DAYS:
            day_and_key = (TODAY - days_ago, caller.key)
            requests, tokens_so_far = sums.get(day_and_key, (0, 0))
            sums[day_and_key] = (requests + 1, tokens_so_far + tokens + 1)
    assert totals(stored_records(entries)) == sums


@settings(max_examples=40)
@given(ENTRIES, st.data())
def test_an_interrupted_compaction_counts_no_request_twice(entries, data) -> None:
    texts = stored_records(entries)
    before = totals(texts)
    for _ in range(2):
        merged, obsolete = compacted(texts, TODAY)
        texts |= merged
        for name in obsolete[: data.draw(st.integers(0, len(obsolete)))]:
            del texts[name]
        assert totals(texts) == before
    merged, obsolete = compacted(texts, TODAY)
    texts = {name: text for name, text in (texts | merged).items() if name not in obsolete}
    assert totals(texts) == before
    assert compacted(texts, TODAY) == ({}, ()), "a second compaction changes nothing"
    days = {name.partition("/")[0] for name in texts}
    assert len(texts) <= len(days) + 2 * 2, "only the last two days have more than one record"


def test_compaction_skips_today_and_yesterday_and_sums_skip_unreadable_records() -> None:
    for days_ago in (0, 1):
        open_day = stored_records([("life-1", ANN, 4, days_ago), ("life-2", BOB, 5, days_ago)])
        assert compacted(open_day, TODAY) == ({}, ())
    past_day = stored_records([("life-1", ANN, 4, 2), ("life-2", BOB, 5, 2)])
    merged, obsolete = compacted(past_day, TODAY)
    assert len(merged) == 1
    assert set(obsolete) == set(past_day)
    assert totals(merged) == totals(past_day)
    invalid = {"2026-13-40/x": "{}", "nonsense": "1", f"{date_of(TODAY)}/y": '{"rows": [[1]]}'}
    assert totals(past_day | invalid) == totals(past_day)


async def test_a_day_is_written_only_after_a_change_and_dropped_once_it_is_past_and_stored() -> (
    None
):
    records = SwitchableRecords()
    ledger = usage_store("life", records)
    ledger.add(ANN, Usage(5, 2, 1), Spent(1, 7), TODAY * DAY_S)
    for _ in range(2):
        await ledger.flush()
        ((name, text),) = records.texts["usage"].items()
        assert name == f"{date_of(TODAY)}/life"
        assert json.loads(text)["rows"] == [["key-a", "lab", 1, 5, 2, 1, 0, 0]]
        assert records.writes == 1
    records, past = SwitchableRecords(), {(TODAY - 9, "key-a"): (1, 7)}
    ledger = usage_store("life", records)
    ledger.add(ANN, Usage(5, 2, 1), Spent(1, 7), (TODAY - 9) * DAY_S)
    records.writable = False
    for _ in range(2):
        with pytest.raises(RecordsUnwritable):
            await ledger.flush()
        assert totals(ledger.records()) == past
    records.writable = True
    await ledger.flush()
    assert ledger.records() == {}
    assert totals(records.texts["usage"]) == past


async def test_tokens_used_today_include_earlier_processes() -> None:
    records = MemoryRecords()
    ledger = usage_store("life-2", records)
    records.texts["usage"] = stored_records(
        [("life-1", ANN, 9, 0), ("life-3", ANN, 1, 0), ("life-1", ANN, 100, 1)]
    )
    await ledger.open()
    ledger.add(ANN, Usage(5, 2, 1), Spent(1, 7), TODAY * DAY_S)
    assert ledger.tokens_used("key-a", TODAY * DAY_S) == 10 + 2 + 7
    assert ledger.tokens_used("key-a", (TODAY + 1) * DAY_S) == 0


def usage_of(gateway: RunningGateway, query: str = "") -> dict[str, Any]:
    usage: dict[str, Any] = gateway.admin.get(f"/admin/v1/usage{query}").json()
    return usage


def row_of(usage: dict[str, Any], key: str) -> dict[str, Any]:
    (match,) = [entry for entry in usage["rows"] if entry["key"] == key]
    return dict(match)


def test_usage_is_reported_by_key_and_by_team_as_json_and_csv(gateway_with_worker) -> None:
    gateway = gateway_with_worker
    for name, team, times in (("Eve", "", 1), ("Bob", "lab", 1), ("Ann", "lab", 2)):
        key = gateway.use_new_key(name=name, team=team)
        assert [gateway.chat().status_code for _ in range(times)] == [200] * times
    assert gateway.chat(temperature=9).status_code == 400
    usage = usage_of(gateway)
    expected = {
        "day": str(datetime.now(UTC).date()),
        "key": key["id"],
        "name": "Ann",
        "team": "lab",
        "requests": 2,
        "prompt_tokens": 14,
        "completion_tokens": 6,
        "cached_tokens": 4,
        "guessed_tokens": 0,
        "cached_unknown_requests": 0,
    }
    assert row_of(usage, key["id"]) == expected
    assert usage["teams"]["lab"]["requests"] == 3
    assert usage["teams"][""]["completion_tokens"] == 3
    assert sorted(row["requests"] for row in usage["keys"].values()) == [1, 1, 2]
    assert gateway.admin.get("/admin/v1/usage?format=json").json() == usage
    for response in (
        gateway.admin.get("/admin/v1/usage?format=csv"),
        gateway.admin.get("/admin/v1/usage", headers={"accept": "text/csv"}),
    ):
        assert response.headers["content-type"] == "text/csv; charset=utf-8"
        table = csv.DictReader(io.StringIO(response.text))
        assert table.fieldnames == [*[*expected][:4], *UsageRow._fields[2:]]
        (entry,) = (row for row in table if row["key"] == key["id"])
        assert entry == {name: str(value) for name, value in expected.items()}
    assert usage_of(gateway, "?from=2020-01-01&to=2020-12-31")["rows"] == []
    assert usage_of(gateway, "?from=2020-01-01")["rows"] == usage["rows"]


def test_an_aborted_stream_is_reported_with_guessed_tokens_which_count_against_a_budget(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    assert UsageRow("a", "", 1, 10, 4, 2, 7).tokens == 10 + 4 + 7
    assert gateway_with_worker.chat().status_code == 200
    (row,) = usage_of(gateway_with_worker)["rows"]
    assert (row["key"], row["name"], row["requests"], row["prompt_tokens"]) == ("", "", 1, 7)
    key = gateway_with_worker.use_new_key()["id"]
    with gateway_with_worker.stream() as response:
        response.read()
    worker.script = Script(hang_after=2)
    with begun(gateway_with_worker.stream(max_tokens=50)):
        pass
    wait_until(lambda: row_of(usage_of(gateway_with_worker), key)["requests"] == 2)
    usage = row_of(usage_of(gateway_with_worker), key)
    assert (usage["prompt_tokens"], usage["guessed_tokens"]) == (7, 16 + 4 + 50)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?format=xml", "format"),
        ("?from=yesterday", "from"),
        ("?to=2026-02-30", "to"),
        ("?from=2026-02-02&to=2026-02-01", "from"),
    ],
)
def test_an_invalid_query_parameter_is_named(module_gateway, query, param) -> None:
    response = module_gateway.admin.get(f"/admin/v1/usage{query}")
    assert status_and_code(response) == (400, "invalid_value")
    assert response.json()["error"]["param"] == param


def test_usage_accumulates_over_restarts_and_stays_with_the_team_of_its_time(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    key: dict[str, Any] = {}
    for times, team in ((1, "lab"), (2, "shop"), (3, "shop")):
        with RunningGateway(make_settings(tmp_path)) as gateway:
            gateway.join(worker)
            key = key or gateway.create_key()
            gateway.admin.patch(f"/admin/v1/keys/{key['id']}", json={"team": team})
            assert gateway.chat(headers=bearer_headers(key)).status_code == 200
            usage = usage_of(gateway)
            assert usage["keys"][key["id"]]["requests"] == times
    teams = {team: sums["requests"] for team, sums in usage["teams"].items()}
    assert teams == {"lab": 1, "shop": 2}


def test_f54_requests_succeed_while_the_disk_fails_and_usage_is_saved_at_run_time(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    def saved() -> dict[str, Any]:
        state = json.loads((tmp_path / "state.json").read_text())
        usage: dict[str, Any] = state.get("usage", {})
        return usage

    timing = replace(TIMING, usage_flush_s=0.05)
    with RunningGateway(make_settings(tmp_path), timing) as gateway:
        gateway.join(worker)
        key = gateway.use_new_key()["id"]
        lock = tmp_path / ".state.json.lock"
        lock.unlink()
        lock.mkdir()
        rejected = gateway.admin.post("/admin/v1/keys", json={"name": "no"})
        assert status_and_code(rejected) == (503, "state_unavailable")
        assert gateway.chat().status_code == 200
        assert row_of(usage_of(gateway), key)["requests"] == 1
        lock.rmdir()
        wait_until(lambda: bool(saved()))
        (record,) = saved().values()
        assert record["rows"] == [[key, "", 1, 7, 3, 2, 0, 0]]


async def test_recent_usage_is_that_of_the_last_minute_and_of_the_last_hour() -> None:
    usage = RecentUsage()
    usage.current["early", "tokens"] += 1
    for _ in range(6 * 75):
        usage.current.update(
            {("steady", "requests"): 1, ("steady", "tokens"): 2, ("steady", "waited_ms"): 500}
        )
        await usage.turn()
    usage.current.update({("late", "requests"): 1, ("late", "tokens"): 7})
    minute, hour = usage.last_minute(), usage.last_hour()

    def used(counts: Counter[tuple[str, str]], key: str) -> list[int]:
        return [counts[key, name] for name in ("requests", "tokens", "waited_ms")]

    assert (used(minute, "steady"), used(hour, "steady")) == ([6, 12, 3000], [360, 720, 180_000])
    assert used(minute, "late") == used(hour, "late") == [1, 7, 0]
    assert "early" not in {key for key, _ in hour}


def test_a_key_sees_its_recent_usage_and_an_admin_that_of_all(gateway_with_worker, worker) -> None:
    gateway = gateway_with_worker
    gateway.chat()
    (row,) = gateway.client.get("/v1/usage").json()["keys"]
    assert (row["key"], row["last_minute"]["requests"]) == ("", 1), "no key is needed yet"
    ann, bob = (gateway.create_key(name=name) for name in ("Ann", "Bob"))
    gateway.chat(headers=bearer_headers(ann))
    for _ in range(3):
        gateway.chat(headers=bearer_headers(bob))
    (own,) = gateway.client.get("/v1/usage", headers=bearer_headers(ann)).json()["keys"]
    assert (own["name"], own["last_hour"]["requests"]) == ("Ann", 1)
    admin = {"authorization": f"Bearer {gateway.admin_key}"}
    worker.script = Script(hang_after=3)
    with begun(gateway.stream(headers=bearer_headers(ann))) as read:
        rows = gateway.client.get("/v1/usage", headers=admin).json()["keys"]
        worker.resume.set()
        read()
    assert rows[0]["name"] == "Bob", "who uses most is first"
    assert {row["name"]: row["running"] for row in rows} == {"Bob": 0, "Ann": 1, "": 0}
    used = gateway.admin.get("/admin/v1/usage").json()["keys"][bob["id"]]
    tokens = used["prompt_tokens"] + used["completion_tokens"]
    assert rows[0]["last_minute"] == {"requests": 3, "tokens": tokens, "waited_ms": 0}
