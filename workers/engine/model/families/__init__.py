"""Passes of families that mlx-vlm cannot run for several rows."""
