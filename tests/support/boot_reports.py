"""What the boots of a worker report: counts that grow by the request."""

from __future__ import annotations

from tests.support.scripted_worker import ScriptedWorker, lane_report, speculation
from workers.protocol import WorkerReport


def boot_report(boot_id: str, requests: int, model: str = "demo") -> WorkerReport:
    """A report of a boot that has answered so many requests, and accepted both drafts of each."""
    lane = lane_report(
        "text-mtp",
        requests=requests,
        completion_tokens=5 * requests,
        bypass_counts={"media": requests},
        speculation=speculation(steps=requests, one=0, two=requests),
    )
    fake = ScriptedWorker(boot_id=boot_id, model=model)
    fake.socket.close()
    return fake.report(lanes=[lane.model_dump()])
