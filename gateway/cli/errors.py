"""Show the last requests that failed, of all keys with the admin key, else of one's own."""

from __future__ import annotations

from datetime import datetime

from rich.text import Text

from gateway.cli.client import connect, plain_table, print_answer, print_output


def run(*, url: str, as_json: bool) -> int:
    """Print the last errors, the newest first."""
    gateway, path = connect(url, admin=True), "/admin/v1/errors"
    if not gateway.has_key:
        gateway, path = connect(url), "/v1/errors"
    answer = gateway.read("GET", path)
    if not answer["errors"] and not as_json:
        return print_output("No recent request has failed.")
    table = plain_table("Time", "Reason", "Model", "Worker", "Key, from", "Request")
    for one in answer["errors"]:
        time = datetime.fromisoformat(one["time"]).astimezone()
        times = f"{one['count']} times: " if one["count"] > 1 else ""
        reason = Text.assemble(times, one["reason"], " ", (f"{one['status']} {one['code']}", "dim"))
        key = f"{one['key_name'] or one['key']} {one['address']}".strip()
        table.add_row(
            *(f"{time:%m-%d %H:%M:%S %Z}", reason, one["model"], one["worker"], key),
            one["request_id"],
        )
    return print_answer(answer, table, as_json=as_json)
