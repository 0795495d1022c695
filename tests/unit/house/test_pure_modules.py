"""The deciding modules know no network, no clock and no framework."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PURE = (
    "gateway/fleet/circuit_breaker.py",
    "gateway/types.py",
    "gateway/errors.py",
    "gateway/errors.py",
    "gateway/auth/api_keys.py",
    "gateway/auth/rate_limits.py",
    "gateway/auth/rate_limits.py",
    "gateway/auth/rate_limits.py",
    "gateway/auth/records.py",
    "gateway/auth/usage.py",
    "gateway/protocols/openai.py",
    "gateway/config/static_workers.py",
    "gateway/protocols/openai.py",
    "gateway/routing/select.py",
    "gateway/protocols/event_stream.py",
    "gateway/status/render.py",
    "gateway/storage/counters.py",
    "gateway/fleet/fair_queue.py",
    "gateway/fleet/registry.py",
    "gateway/fleet/worker.py",
    "gateway/fleet/registry.py",
    "gateway/routing/cost.py",
    "gateway/proxy/quarantine.py",
    "gateway/proxy/retry_budget.py",
    "gateway/config/policy_versions.py",
    "gateway/config/policy_versions.py",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "policies").glob("*.py")),
)
IMPURE = {
    "httptools",
    "asyncio",
    "fastapi",
    "httpx",
    "redis",
    "socket",
    "starlette",
    "time",
    "uvicorn",
}


@pytest.mark.parametrize("path", PURE)
def test_a_pure_module_imports_nothing_that_waits_or_talks(path: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported & IMPURE == set()
