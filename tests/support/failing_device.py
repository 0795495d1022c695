"""A real worker whose device fails for as long as a file exists.

`python -m tests.support.failing_device FILE ARGUMENTS...` is `paceline worker ARGUMENTS...`. MLX
reports a device failure by an error from `mx.eval` or `mx.async_eval`, so this worker raises there;
everything else is unchanged. A file with a text fails one evaluation with it, and is then removed.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support.lapack import invert_by_lapack
from workers.server.main import main


def fail_while_file_exists(evaluate: Callable[..., None], fault_file: Path) -> Callable[..., None]:
    """Return a function that raises while the file exists, and else evaluates."""

    def evaluate_or_fail(*results: Any) -> None:
        if fault_file.exists():
            if text := fault_file.read_text():
                fault_file.unlink()
                raise RuntimeError(text)
            raise RuntimeError("[METAL] Command buffer execution failed: Internal Error (0000000e)")
        evaluate(*results)

    return evaluate_or_fail


if __name__ == "__main__":
    invert_by_lapack()
    fault_file = Path(sys.argv[1])
    mx.eval, mx.async_eval = (
        fail_while_file_exists(mx.eval, fault_file),
        fail_while_file_exists(mx.async_eval, fault_file),
    )
    sys.exit(main(sys.argv[2:]))
