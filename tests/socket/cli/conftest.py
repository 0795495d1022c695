"""Fixtures of tests that start commands, which may take longer to start than a worker is silent."""

from tests.support.gateway_fixtures import gateway_with_heartbeats  # noqa: F401
