"""What a gateway says of the Redis that it shares."""

from __future__ import annotations

from tests.support.running_gateway import RunningGateway


def store(gateway: RunningGateway) -> dict[str, object]:
    """What its status says of Redis."""
    told: dict[str, object] = gateway.status()["store"]
    return told


def degraded(gateway: RunningGateway) -> bool:
    """Say whether it goes by what it knows itself."""
    return store(gateway)["state"] == "degraded"


def well(gateway: RunningGateway) -> bool:
    """Say whether it has its Redis."""
    return store(gateway)["state"] == "ok"
