"""Kept state: each concept with two back ends, memory with files, and Redis."""
