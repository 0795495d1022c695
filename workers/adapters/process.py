"""What a worker's process tells who started it: where it listens, and why it ended.

An end by a signal has no code of ours: MLX aborts the process where a kernel fails on the GPU, and
the system ends it where memory cannot be had. A supervisor starts it again in both cases.
"""

from __future__ import annotations

from enum import IntEnum

READY_PREFIX = "PACELINE_WORKER_READY "
"""Opens the line by which `paceline worker` tells a program where it listens; JSON follows."""


class ExitCode(IntEnum):
    """The codes of `paceline worker`."""

    ENDED = 0
    """Asked to end, and did."""
    CRASHED = 1
    """An error that nobody foresaw; Python's own code for it."""
    SETTINGS = 2
    """Settings that cannot work."""
    MODEL = 3
    """A model that cannot be served."""
    ENGINE_DIED = 4
    """The engine can compute nothing any more: every answer would fail."""
    INTERRUPTED = 130
    """Ctrl-C while the weights were loading."""
