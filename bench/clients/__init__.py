"""Unmodified third-party clients and load generators against a gateway with the demo model."""
