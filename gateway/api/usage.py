"""`GET /admin/v1/usage`: the usage of keys and teams by day, as JSON or CSV.

`GET /v1/usage`: that of the last minute and hour at this gateway; of all keys for an admin.
"""

from __future__ import annotations

import csv
import io
from datetime import date
from typing import Annotated, Any, Literal

from fastapi import Header, Query
from pydantic import BeforeValidator
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from gateway.api.auth import (
    CurrentGateway,
    CurrentKey,
    CurrentProxy,
    admin_router,
    data_router,
)
from gateway.api.openapi import FOR_ADMINS, FOR_CLIENTS, STORED, failures
from gateway.auth.api_keys import ADMIN_KEY_ID
from gateway.auth.rate_limits import day_of
from gateway.auth.usage import UsageRow, date_of, sum_by
from gateway.errors import FieldInvalid
from gateway.telemetry.recent_usage import RecentUse, used

router = admin_router()
own = data_router()
_SHOWN_DAYS = 31
_COUNTS = UsageRow._fields[2:]


def _parse_day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError("it must be a day like 2026-11-30") from None


Day = Annotated[date, BeforeValidator(_parse_day)]


UsageReport = TypedDict(
    "UsageReport",
    {
        "from": date,
        "to": date,
        "rows": list[dict[str, Any]],
        "keys": dict[str, dict[str, int]],
        "teams": dict[str, dict[str, int]],
    },
)


class KeyUse(TypedDict):
    """The recent requests of one key at this gateway."""

    key: str
    """Empty for those without a key."""
    name: str
    running: int
    """Requests that run or wait now."""
    last_minute: RecentUse
    last_hour: RecentUse


class RecentUsageReport(TypedDict):
    """The keys that were used in the last hour, those with the most tokens of a minute first."""

    keys: list[KeyUse]


@own.get("/v1/usage", responses=failures(*FOR_CLIENTS))
async def recent(
    gateway: CurrentGateway, proxy: CurrentProxy, api_key: CurrentKey
) -> RecentUsageReport:
    """Show the recent usage of the API key, or of all keys for the admin key or without keys."""
    asking, counts = api_key.caller.key, gateway.accounting.recent_usage
    minute, hour, running = counts.last_minute(), counts.last_hour(), proxy.running_by_key()
    names = {key: record.name for key, record in gateway.api_keys.records.items()}
    rows: list[KeyUse] = [
        {
            "key": key,
            "name": names.get(key, ""),
            "running": running[key],
            "last_minute": minute.get(key, used()),
            "last_hour": hour.get(key, used()),
        }
        for key in sorted({*hour, *running})
        if asking in (ADMIN_KEY_ID, key) or not gateway.api_keys.required
    ]
    rows.sort(key=_most_first)
    return {"keys": rows}


def _most_first(row: KeyUse) -> list[int]:
    parts = row["last_minute"], row["last_hour"]
    return [-count for part in parts for count in (part["tokens"], part["requests"])]


@router.get(
    "/admin/v1/usage",
    response_model=UsageReport,
    responses=failures(*FOR_ADMINS, FieldInvalid, *STORED)
    | {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def usage(
    gateway: CurrentGateway,
    first_day: Annotated[Day | None, Query(alias="from", description="In UTC.")] = None,
    last_day: Annotated[Day | None, Query(alias="to", description="The last day.")] = None,
    form: Annotated[
        Literal["json", "csv"] | None,
        Query(alias="format", description="The format; the default follows `Accept`."),
    ] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Report the usage of the last 31 days, or of the given ones."""
    today = day_of(gateway.wall())
    first = first_day or date_of(today - _SHOWN_DAYS + 1)
    last = last_day or date_of(today)
    if first > last:
        raise FieldInvalid("'from' is later than 'to'.", param="from")
    days = await gateway.usage_store.usage()
    shown = {date_of(day): days[day] for day in sorted(days) if first <= date_of(day) <= last}
    names = {key: record.name for key, record in gateway.api_keys.records.items()}
    rows = [
        {"day": str(day), "name": names.get(row.key, ""), **row._asdict()}
        for day, day_rows in shown.items()
        for row in day_rows
    ]
    if form == "csv" or (form is None and "text/csv" in accept):
        text = io.StringIO()
        table = csv.DictWriter(text, ["day", "key", "name", "team", *_COUNTS])
        table.writeheader()
        table.writerows(rows)
        return Response(text.getvalue(), headers={"content-type": "text/csv; charset=utf-8"})
    every = [row for day_rows in shown.values() for row in day_rows]
    sums = {
        f"{name}s": {
            value: {count: getattr(row, count) for count in _COUNTS}
            for value, row in sum_by(every, name).items()
        }
        for name in ("key", "team")
    }
    return JSONResponse({"from": str(first), "to": str(last), "rows": rows, **sums})
