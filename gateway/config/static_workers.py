"""Static workers: engines of other kinds, which `paceline.yaml` lists or an admin has joined.

Such an engine sends no heartbeats and no reports. A probe checks whether it is up, and its load is
the number of requests that this gateway has sent it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gateway.errors import StartupError
from gateway.types import MAX_ENGINE_MODELS, EngineKind, header_problem
from paceline.addresses import BaseUrl
from paceline.names import Label, Name, OneModel
from paceline.protocol import MAX_LABELS, MAX_LANES

if TYPE_CHECKING:
    # A command that only asks a gateway reads no policy, and starts in half the time.
    from policies.document import PolicyDocument


WORKER_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class StaticWorker(BaseModel):
    """One entry of `workers` in `paceline.yaml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=WORKER_ID)
    kind: EngineKind = "auto"
    """The engine; `auto`: the gateway asks it."""
    url: BaseUrl
    """Base URL of its API, with or without the trailing /v1."""
    models: Annotated[
        tuple[OneModel, ...] | dict[OneModel, OneModel], Field(max_length=MAX_ENGINE_MODELS)
    ] = ()
    """Those of its models to serve, by the names that the engine itself uses, or a map from names
    for clients to these; empty: all that it lists."""
    pools: Annotated[tuple[Name, ...], Field(max_length=MAX_LANES)] = ()
    """Names of pools or lanes of the policy; empty: those of its kind."""
    labels: tuple[Label, ...] = Field(default=(), max_length=MAX_LABELS)
    """Labels that pools of the policy use to select workers."""
    slots: int | None = Field(default=None, ge=1, le=1_000_000)
    """The most requests at a time, over all its pools and models; None: as the engine reports, or a
    default of its kind."""
    api_key_env: str = Field(default="", pattern=r"^[A-Za-z_]?[A-Za-z0-9_]*$")
    """The environment variable that holds its API key, so that no key is in the file."""
    cache_salt: bool = False
    """Whether to send vLLM's field `cache_salt`, which isolates clients in its prefix cache."""

    @field_validator("url")
    @classmethod
    def _strip_path(cls, value: str) -> str:
        return value.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def names(self) -> Mapping[str, str]:
        """Return the names of its models at the engine, by those for clients."""
        models = self.models
        return models if isinstance(models, dict) else {name: name for name in models}


def read_worker_key(worker: StaticWorker, environment: Mapping[str, str]) -> str:
    """Return the API key of a worker that needs one; raise `StartupError`."""
    # Secret files often end with a newline.
    key = environment.get(worker.api_key_env, "").strip()
    if not key:
        raise StartupError(
            f"The worker '{worker.id}' needs an API key in the environment variable "
            f"{worker.api_key_env}, which is not set."
        )
    if problem := header_problem(key):
        raise StartupError(
            f"{worker.api_key_env}, the API key of the worker '{worker.id}', {problem}."
        )
    return key


def check_unique_ids(workers: Iterable[StaticWorker]) -> None:
    """Raise `StartupError` if two workers have the same id."""
    for worker_id, count in Counter(worker.id for worker in workers).items():
        if count > 1:
            raise StartupError(f"Two workers in the configuration file have the id '{worker_id}'.")


def pool_problems(workers: Iterable[StaticWorker], policy: PolicyDocument) -> list[str]:
    """List the pools of static workers that the policy lacks or that exclude the worker."""
    problems = []
    for worker in workers:
        accepting = {
            name
            for pool_name, pool in policy.pools.items()
            if pool.accepts(worker.labels, tuple(worker.names))
            for name in (pool_name, *pool.lanes)
        }
        problems += [
            f"the worker '{worker.id}' is configured for the pool '{pool}', but the policy allows "
            f"it only in: {', '.join(sorted(accepting)) or 'none'}"
            for pool in worker.pools
            if pool not in accepting
        ]
    return problems
