"""A real worker whose device fails for as long as a file exists.

`python -m tests.support.failing_device FILE ARGUMENTS...` is `paceline worker ARGUMENTS...`. MLX
reports a device failure by an error from `mx.eval` or `mx.async_eval`, so this worker raises there;
everything else is unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from workers.server.main import main


def fail_while_file_exists(evaluate: Callable[..., None], broken: Path) -> Callable[..., None]:
    """Return the same function, but raising while the file exists."""

    def evaluate_or_die(*results: Any) -> None:
        if broken.exists():
            raise RuntimeError("[METAL] Command buffer execution failed: Internal Error (0000000e)")
        evaluate(*results)

    return evaluate_or_die


if __name__ == "__main__":
    broken = Path(sys.argv[1])
    mx.eval, mx.async_eval = (
        fail_while_file_exists(mx.eval, broken),
        fail_while_file_exists(mx.async_eval, broken),
    )
    sys.exit(main(sys.argv[2:]))
