"""The MLX engine: one copy of the weights, two lanes, one thread that owns every MLX call."""

from workers.engine.engine import Engine, EngineSettings, ModelCard

__all__ = ["Engine", "EngineSettings", "ModelCard"]
