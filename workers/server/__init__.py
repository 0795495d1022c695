"""The HTTP face of a worker: OpenAI's shapes in, the engine's events out."""
