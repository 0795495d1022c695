"""A model larger than one Mac: ranks of MLX on several machines that serve as one worker."""
