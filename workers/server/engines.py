"""The engines that a worker serves, as types: importing one takes seconds, since it imports MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.engine.pooling import PoolingEngine
    from workers.group.engine import GroupEngine

    ServingEngine = Engine | GroupEngine
    RunningEngine = Engine | GroupEngine | PoolingEngine
else:
    ServingEngine = RunningEngine = Any

Json = Any
"""A JSON value; typed loosely only at this boundary."""
