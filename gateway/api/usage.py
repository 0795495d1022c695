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

router = admin_router()
own = data_router()
_SHOWN_DAYS = 31
_USES = ("requests", "tokens", "waited_ms")
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
    """The recent requests of one key at this gateway; an empty one stands for those without."""

    key: str
    name: str
    running: int
    """Requests that run or wait now."""
    last_minute: dict[str, int]
    """`requests`, their `tokens`, and `waited_ms` in queues."""
    last_hour: dict[str, int]


class RecentUsageReport(TypedDict):
    """The keys that were used in the last hour, those with the most tokens of a minute first."""

    keys: list[KeyUse]


@own.get("/v1/usage", responses=failures(*FOR_CLIENTS))
async def recent(
    gateway: CurrentGateway, proxy: CurrentProxy, api_key: CurrentKey
) -> RecentUsageReport:
    """Show the recent usage of the API key; of all keys for the admin key, or without keys."""
    asking, usage = api_key.caller.key, gateway.accounting.recent_usage
    minute, hour, running = usage.last_minute(), usage.last_hour(), proxy.running_by_key()
    records = gateway.api_keys.records
    shown = {key for key, _ in hour} | running.keys()
    if asking != ADMIN_KEY_ID and gateway.api_keys.required:
        shown &= {asking}

    def used(key: str) -> list[int]:
        return [-part[key, name] for part in (minute, hour) for name in ("tokens", "requests")]

    rows: list[KeyUse] = [
        {
            "key": key,
            "name": records[key].name if key in records else "",
            "running": running[key],
            "last_minute": {name: minute[key, name] for name in _USES},
            "last_hour": {name: hour[key, name] for name in _USES},
        }
        for key in sorted(shown, key=used)
    ]
    return {"keys": rows}


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
