"""Fixtures of tests that open no socket."""

from tests.support.gateway_fixtures import clean_environment  # noqa: F401
