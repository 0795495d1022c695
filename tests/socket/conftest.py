"""Fixtures of tests that open sockets."""

from tests.support.gateway_fixtures import *  # noqa: F403
