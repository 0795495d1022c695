"""Engines of other kinds behind a gateway: what works, what is refused, what breaks."""
