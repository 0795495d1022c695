"""Everything that knows an engine: our own MLX engine, its HTTP face, and adapters for others."""
