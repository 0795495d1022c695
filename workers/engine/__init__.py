"""MLX engine: one copy of the weights, two lanes, one thread that makes every MLX call.

Start with `workers.engine.engine.Engine`; importing it imports MLX, which takes seconds.
`workers.engine.types`, the records that enter and leave the engine, imports without MLX.
"""

import os

# mlx-vlm sets it too, but Transformers, which is often imported earlier, reads it only once.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
