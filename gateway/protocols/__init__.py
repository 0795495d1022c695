"""Wire formats: a body to a request, a worker's answer to bytes."""
