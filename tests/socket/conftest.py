"""Fixtures of tests that open sockets."""

from tests.support.gateway_fixtures import (  # noqa: F401
    admin,
    canary_listener,
    clean_environment,
    gateway,
    gateway_behind_proxy,
    gateway_with_traffic,
    gateway_with_worker,
    join_with_heartbeats,
    log_capture,
    long_status_timeout,
    make_cluster_gateway,
    make_gateway,
    private_redis,
    proxy,
    redis,
    second_worker,
    session_redis,
    start_gateway,
    worker,
)
