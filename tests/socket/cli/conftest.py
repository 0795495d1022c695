"""Fixtures of tests that start commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.running_gateway import RunningGateway


@pytest.fixture
def gateway_with_worker(
    gateway: RunningGateway, join_with_heartbeats: Callable[[RunningGateway], None]
) -> RunningGateway:
    """Return a gateway whose worker stays: a command may take longer to start than it is silent."""
    join_with_heartbeats(gateway)
    return gateway
