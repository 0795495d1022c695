"""Workers that are listed by hand: any OpenAI-compatible server, its abilities declared.

Such a server sends no heartbeat and no report. What it can do is what the list says, whether it is
there is what a probe says, and how busy it is is what this gateway has sent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gateway.errors import StartupError
from gateway.types import fits_header
from policies.base import Label, Name
from policies.document import PolicyDocument
from workers.protocol import MTP_LANE, LaneReport, WorkerReport


class ListedWorker(BaseModel):
    """One entry of `workers` in `paceline.yaml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    kind: Literal["openai"]
    url: str
    """Where its API begins, with or without the trailing /v1."""
    models: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Under the names that it knows itself."""
    pools: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Pools or lanes of the policy."""
    labels: tuple[Label, ...] = ()
    """By which pools of the policy may choose it."""
    slots: int = Field(ge=1)
    """Requests that it may have at a time, over all its pools."""
    api_key_env: str = Field(default="", pattern=r"^[A-Za-z_]?[A-Za-z0-9_]*$")
    """The environment variable that holds its key; the key itself never stands in the file."""

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        except ValueError:
            usable = False
        if not usable or "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("must be like http://192.168.1.20:8080/v1")
        return value.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def report(self) -> WorkerReport:
        """What it would report if it could. A lane for each pool, named as the pool."""
        return WorkerReport(
            worker_id=self.id,
            boot_id="listed",
            url=self.url,
            model=self.models[0],
            context_tokens=0,
            labels=self.labels,
            lanes=tuple(
                LaneReport(name=pool, slots=self.slots, mtp_enabled=pool == MTP_LANE)
                for pool in self.pools
            ),
        )


def read_keys(workers: Iterable[ListedWorker], environment: Mapping[str, str]) -> dict[str, str]:
    """Map the ids of workers to their keys; raise `StartupError` where one is missing."""
    keys = {}
    for worker in workers:
        if worker.api_key_env:
            # Files of secrets like to end in the end of a line.
            key = environment.get(worker.api_key_env, "").strip()
            if not key:
                raise StartupError(
                    f"The worker '{worker.id}' needs its key in the environment variable "
                    f"{worker.api_key_env}, which is not set."
                )
            if not fits_header(key):
                raise StartupError(
                    f"{worker.api_key_env}, the key of the worker '{worker.id}', holds what no "
                    "HTTP header can."
                )
            keys[worker.id] = key
    return keys


def check_listed(workers: Iterable[ListedWorker]) -> None:
    """Raise `StartupError` where the list contradicts itself."""
    seen: set[str] = set()
    for worker in workers:
        if worker.id in seen:
            raise StartupError(f"Two workers of the list are called '{worker.id}'.")
        seen.add(worker.id)


def listed_problems(workers: Iterable[ListedWorker], policy: PolicyDocument) -> list[str]:
    """Say where the list names pools that a policy does not have, or not for the worker."""
    problems = []
    for worker in workers:
        known = _open_to(worker, policy)
        problems += [
            f"the worker '{worker.id}' is listed for the pool '{pool}', but the policy has for it "
            f"only: {', '.join(sorted(known)) or 'nothing'}"
            for pool in worker.pools
            if pool not in known
        ]
    return problems


def _open_to(worker: ListedWorker, policy: PolicyDocument) -> set[str]:
    """Name the pools that take a worker, and their lanes."""
    return {
        name
        for pool_name, pool in policy.pools.items()
        if pool.accepts(worker.labels, worker.models)
        for name in (pool_name, *pool.lanes)
    }
