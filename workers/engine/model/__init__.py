"""Models of mlx-vlm, their caches and their MTP heads."""
