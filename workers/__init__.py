"""The worker: the MLX engine, its HTTP server, and its heartbeats to gateways."""
