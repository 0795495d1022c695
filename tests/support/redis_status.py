"""What a gateway says of the Redis that it shares."""

from __future__ import annotations

from tests.support.running_gateway import RunningGateway


def redis_status(gateway: RunningGateway) -> dict[str, object]:
    """What its status says of Redis."""
    told: dict[str, object] = gateway.status()["store"]
    return told


def is_degraded(gateway: RunningGateway) -> bool:
    """Say whether it goes by what it knows itself."""
    return redis_status(gateway)["state"] == "degraded"


def is_connected(gateway: RunningGateway) -> bool:
    """Say whether it has its Redis."""
    return redis_status(gateway)["state"] == "ok"
