"""The MLX engine: one copy of the weights, two lanes, one thread that owns every MLX call."""
