"""Small policies, policy stores, gateways with a policy, and an admin client."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from gateway.config.policy_store import PolicyStore
from gateway.config.policy_versions import Attribution, Proposal, Reason
from gateway.config.static_workers import StaticWorker
from gateway.state.records import Records
from policies.document import PolicyDocument, read_policy
from tests.support.memory_records import MemoryRecords
from tests.support.running_gateway import RunningGateway, make_settings, wait_until
from tests.support.scripted_worker import ScriptedWorker

AUTHOR_ANN = Attribution("ann", "a test", Reason.EDIT)
AUTHOR_BOB = Attribution("bob", "another test", Reason.EDIT)
DEFAULT_ROUTE = {"name": "rest", "to": "vlm"}
"""The route of all requests without another one."""


def single_pool_policy(
    pool: str = "vlm", *, lanes: tuple[str, ...] = ("vlm",), **queue: Any
) -> Any:
    return {
        "version": 1,
        "routes": [{"name": "all", "to": [pool]}],
        "pools": {pool: {"lanes": list(lanes), **({"queue": queue} if queue else {})}},
    }


def vlm_policy(**changes: Any) -> dict[str, Any]:
    """Return a policy of a pool of all `vlm` lanes, with these sections."""
    return {"version": 1, "routes": [DEFAULT_ROUTE], "pools": {"vlm": {"lanes": "vlm"}}, **changes}


def make_policy(routes: Any, pools: Any, **fields: Any) -> PolicyDocument:
    """Return a policy with these routes and pools; a route alone gets all requests."""
    routes = [{"name": "all", "to": routes}] if isinstance(routes, str) else routes
    return read_policy({"version": 1, "routes": routes, "pools": pools, **fields}, "test")


def to_yaml(document: Any) -> str:
    return str(yaml.safe_dump(document, sort_keys=False))


def proposal(pool: str = "vlm") -> Proposal:
    return Proposal.from_document(single_pool_policy(pool))


async def make_policy_store(records: Records | None = None, pool: str = "vlm") -> PolicyStore:
    """Return a store that starts with a one-pool policy, or where the records end."""
    source = proposal(pool), AUTHOR_ANN._replace(reason=Reason.START)
    return await PolicyStore(records or MemoryRecords(), (), source, lambda: 0.0).open()


@contextlib.contextmanager
def gateway_with_policy(
    folder: Path,
    *workers: ScriptedWorker,
    static_workers: tuple[StaticWorker, ...] = (),
    **policy: Any,
) -> Iterator[RunningGateway]:
    """Run a gateway with this policy; each worker has joined with its name as its label."""
    file = folder / "policy.yaml"
    file.write_text(to_yaml(vlm_policy(**policy)))
    with RunningGateway(make_settings(folder, policy=file, workers=static_workers)) as gateway:
        for worker in workers:
            worker.status_report = worker.report(labels=[worker.worker_id])
            gateway.join(worker, labels=[worker.worker_id])
        if static_workers:
            wait_until(lambda: len(gateway.status()["workers"]) == len(static_workers))
        yield gateway


class PolicyAdmin:
    """An admin of a running gateway, which edits its policy over HTTP."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def request(self, method: str, path: str = "", **request: Any) -> httpx.Response:
        return self.client.request(method, f"/admin/v1/policy{path}", **request)

    def get(self, path: str = "", **request: Any) -> httpx.Response:
        return self.request("GET", path, **request)

    def etag(self) -> str:
        return str(self.get().headers["etag"])

    def document(self) -> Any:
        return self.get().json()

    def edit(
        self, method: str, document: Any, path: str = "", note: str = "a test", **headers: str
    ) -> httpx.Response:
        """Edit the active version, unless the headers name another one."""
        overrides = {name.replace("_", "-"): value for name, value in headers.items()}
        request_headers = {"if-match": self.etag(), "x-paceline-note": note, **overrides}
        if isinstance(document, str):
            request_headers.setdefault("content-type", "application/yaml")
            return self.request(method, path, content=document, headers=request_headers)
        return self.request(method, path, json=document, headers=request_headers)

    def put(self, document: Any, **headers: str) -> httpx.Response:
        return self.edit("PUT", document, **headers)

    def use(self, **policy: Any) -> None:
        """Replace the policy by `vlm_policy` with these sections."""
        response = self.put(vlm_policy(**policy))
        assert response.is_success, response.text

    def patch(self, document: Any, **headers: str) -> httpx.Response:
        return self.edit("PATCH", document, **headers)

    def post(self, path: str, document: Any, kind: str = "application/json") -> Any:
        content = document if isinstance(document, str) else json.dumps(document)
        headers = {"content-type": kind}
        return self.request("POST", path, content=content, headers=headers).json()
