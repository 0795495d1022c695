"""Reports of boots, with counts for a number of requests."""

from paceline.protocol import WorkerReport
from tests.support.scripted_worker import ScriptedWorker, lane_report, speculation


def boot_report(boot_id: str, requests: int, model: str = "demo") -> WorkerReport:
    """Return the report of a boot with this number of requests, each with two accepted drafts."""
    lane = lane_report(
        "text-mtp",
        requests=requests,
        completion_tokens=5 * requests,
        bypass_counts={"media": requests},
        speculation=speculation(steps=requests, one=0, two=requests),
    )
    worker = ScriptedWorker(boot_id=boot_id, model=model)
    worker.socket.close()
    return worker.report(lanes=[lane.model_dump()])
