"""The worker: the MLX engine, its HTTP server, and its protocol with gateways."""
