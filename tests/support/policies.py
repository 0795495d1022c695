"""Small policies for tests, a book of them, a gateway that goes by one, and an admin of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.config.policy_store import PolicyStore, open_policy_store
from gateway.config.policy_versions import Attribution, Proposal, Reason, propose
from gateway.config.static_workers import StaticWorker
from gateway.storage.records import Records
from tests.support.memory_records import MemoryRecords
from tests.support.running_gateway import RunningGateway, make_settings, wait_until
from tests.support.scripted_worker import ScriptedWorker

AUTHOR_ANN = Attribution("ann", "a test", Reason.EDIT)
AUTHOR_BOB = Attribution("bob", "another test", Reason.EDIT)
DEFAULT_ROUTE = {"name": "rest", "to": "vlm"}
"""The route that takes what no other one takes."""


def single_pool_policy(
    pool: str = "vlm", *, lanes: tuple[str, ...] = ("vlm",), **queue: Any
) -> Any:
    """A policy that sends everything to one pool."""
    return {
        "version": 1,
        "routes": [{"name": "all", "to": [pool]}],
        "pools": {pool: {"lanes": list(lanes), **({"queue": queue} if queue else {})}},
    }


def to_yaml(written: Any) -> str:
    return str(yaml.safe_dump(written, sort_keys=False))


def proposal(pool: str = "vlm") -> Proposal:
    return propose(single_pool_policy(pool))


async def make_policy_store(records: Records | None = None, pool: str = "vlm") -> PolicyStore:
    """A book that begins with one pool, or goes on where the records end."""
    source = proposal(pool), AUTHOR_ANN._replace(reason=Reason.START)
    return await open_policy_store(records or MemoryRecords(), (), source, lambda: 0.0)


@contextlib.contextmanager
def gateway_with_policy(
    folder: Path, *workers: ScriptedWorker, by_hand: tuple[StaticWorker, ...] = (), **policy: Any
) -> Iterator[RunningGateway]:
    """A gateway with this policy; these workers have joined, each labelled with its own name."""
    written = {
        "version": 1,
        "routes": [DEFAULT_ROUTE],
        "pools": {"vlm": {"lanes": "vlm"}},
        **policy,
    }
    file = folder / "policy.yaml"
    file.write_text(to_yaml(written))
    with RunningGateway(make_settings(folder, policy=file, workers=by_hand)) as gateway:
        for worker in workers:
            worker.status_report = worker.report(labels=[worker.worker_id])
            assert gateway.send_heartbeat(worker, labels=[worker.worker_id]).status_code == 200
        if by_hand:
            wait_until(lambda: len(gateway.status()["workers"]) == len(by_hand))
        yield gateway


ROUTES = (
    ("GET", ""),
    ("PUT", ""),
    ("PATCH", ""),
    ("POST", "/validate"),
    ("POST", "/diff"),
    ("GET", "/history"),
    ("GET", "/history/1"),
    ("POST", "/rollback"),
)
"""Of the policy, behind `/admin/v1/policy`."""


class PolicyAdmin:
    """An admin of a running gateway, who edits its policy over HTTP."""

    def __init__(self, url: str, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=30)

    def __enter__(self) -> PolicyAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def request(self, method: str, path: str = "", **request: Any) -> httpx.Response:
        """Ask a route of the policy."""
        return self.client.request(method, f"/admin/v1/policy{path}", **request)

    def get(self, path: str = "", **request: Any) -> httpx.Response:
        return self.request("GET", path, **request)

    def etag(self) -> str:
        return str(self.get().headers["etag"])

    def document(self) -> Any:
        return self.get().json()

    def edit(
        self, method: str, written: Any, path: str = "", note: str = "a test", **headers: str
    ) -> httpx.Response:
        """Edit what is in force now, unless the headers say otherwise."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"if-match": self.etag(), "x-paceline-note": note, **given}
        if isinstance(written, str):
            sent.setdefault("content-type", "application/yaml")
            return self.request(method, path, content=written, headers=sent)
        return self.request(method, path, json=written, headers=sent)

    def put(self, written: Any, **headers: str) -> httpx.Response:
        return self.edit("PUT", written, **headers)

    def patch(self, written: Any, **headers: str) -> httpx.Response:
        return self.edit("PATCH", written, **headers)

    def post(self, path: str, written: Any, kind: str = "application/json") -> Any:
        content = written if isinstance(written, str) else json.dumps(written)
        headers = {"content-type": kind}
        return self.request("POST", path, content=content, headers=headers).json()
