"""The state of Redis in `/v1/status`, and what gateways share by it."""

from tests.support.running_gateway import RunningGateway


def redis_status(gateway: RunningGateway) -> dict[str, object]:
    """Return the part `store` of the status.

    Without it, as while a gateway that has not read its keys refuses all clients, return nothing.
    """
    return gateway.status().get("store", {})


def remaining(gateway: RunningGateway, what: str = "tokens") -> int:
    """Return what remains of a limit of the client's key, or -1 without one."""
    headers = gateway.client.post("/v1/chat/completions", json={}).headers
    return int(headers.get(f"x-ratelimit-remaining-{what}", "-1"))


def is_degraded(gateway: RunningGateway) -> bool:
    return redis_status(gateway).get("state") == "degraded"


def is_connected(gateway: RunningGateway) -> bool:
    return redis_status(gateway).get("state") == "ok"
