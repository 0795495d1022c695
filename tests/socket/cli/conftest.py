"""Fixtures of tests that start commands, which may take longer to start than a worker is silent."""

from tests.support.heartbeats import gateway_with_worker  # noqa: F401
