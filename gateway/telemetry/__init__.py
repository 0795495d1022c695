"""Statistics, accounting, Prometheus, access log, traces."""
