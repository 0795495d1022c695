"""`GET /admin/v1/usage`: what keys and teams have used, by day, as JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.auth import with_admin_key
from gateway.api.openapi import FOR_ADMINS, KEPT, failures, parameter, success
from gateway.assembly import Gateway
from gateway.auth.rate_limits import day_of
from gateway.auth.usage import UsageRow, date_of, sum_by
from gateway.errors import FieldInvalid

_SHOWN_DAYS = 31
_COUNTS = UsageRow._fields[2:]


def usage(gateway: Gateway) -> APIRouter:
    """Hold the route of the usage."""
    router = APIRouter(dependencies=[Depends(with_admin_key(gateway))])

    asked = [
        parameter("from", "query", "The first day, in UTC.", format="date"),
        parameter("to", "query", "The last day.", format="date"),
        parameter("format", "query", "What comes; else by `Accept`.", enum=["json", "csv"]),
    ]
    told = failures(*FOR_ADMINS, FieldInvalid, *KEPT)

    @router.get(
        "/admin/v1/usage",
        responses=told | success({"type": "object"}, "text/csv"),
        openapi_extra={"parameters": asked},
    )
    async def whole(request: Request) -> Response:
        as_csv = _wants_csv(request)
        today = day_of(gateway.wall())
        first = _day(request, "from", today - _SHOWN_DAYS + 1)
        last = _day(request, "to", today)
        if first > last:
            raise FieldInvalid("'from' is later than 'to'.", param="from")
        days = await gateway.usage_store.usage()
        shown = {day: days[day] for day in sorted(days) if first <= day <= last}
        names = {key: record.name for key, record in gateway.api_keys.records.items()}
        rows = [
            {"day": str(date_of(day)), "name": names.get(row.key, ""), **row._asdict()}
            for day, day_rows in shown.items()
            for row in day_rows
        ]
        if as_csv:
            return Response(_csv(rows), headers={"content-type": "text/csv; charset=utf-8"})
        every = [row for day_rows in shown.values() for row in day_rows]
        told = {
            "from": str(date_of(first)),
            "to": str(date_of(last)),
            "rows": rows,
            "keys": _sums(every, "key"),
            "teams": _sums(every, "team"),
        }
        return JSONResponse(told)

    return router


def _wants_csv(request: Request) -> bool:
    form = request.query_params.get("format")
    if form not in {None, "csv", "json"}:
        raise FieldInvalid("'format' must be 'json' or 'csv'.", param="format")
    return form == "csv" or (form is None and "text/csv" in request.headers.get("accept", ""))


def _day(request: Request, name: str, otherwise: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return otherwise
    try:
        return (date.fromisoformat(text) - date_of(0)).days
    except ValueError:
        raise FieldInvalid(f"'{name}' must be a day like 2026-11-30.", param=name) from None


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, ["day", "key", "name", "team", *_COUNTS])
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _sums(rows: Iterable[UsageRow], name: str) -> dict[str, dict[str, int]]:
    return {
        value: {count: getattr(row, count) for count in _COUNTS}
        for value, row in sum_by(rows, name).items()
    }
