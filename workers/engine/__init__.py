"""The MLX engine: one copy of the weights, two lanes, one thread that owns every MLX call.

`workers.engine.engine.Engine` is the door; importing it imports MLX, which takes seconds.
`workers.engine.types`, the records that go in and come out, needs none of it.
"""
