"""The HTTP server of a worker: OpenAI's API in front of the engine."""
