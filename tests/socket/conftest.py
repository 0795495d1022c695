"""Fixtures of tests that open sockets."""

from tests.support.gateway_fixtures import (  # noqa: F401
    admin,
    any_redis,
    busy,
    clean_environment,
    gateway,
    hasty,
    heard,
    joins,
    line,
    makes,
    own_redis,
    patient_refresh,
    proxied,
    proxy,
    redis,
    second_worker,
    starts,
    trap,
    worker,
)
