"""Decoding: rows, their batch, and its steps."""
