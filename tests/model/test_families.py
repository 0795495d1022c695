"""Model families: each loads, batches, drafts and reuses what it has read, and answers exactly.

`python -m bench.families` checks each of them in every format.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.families.checkpoints import FORMATS, write_checkpoint
from bench.families.checks import check_checkpoint
from bench.families.configs import FAMILIES, Family

WINDOWED = [family for family in FAMILIES if family.window]
SMALL_WINDOW = 40


@pytest.mark.parametrize(
    ("number", "family"), list(enumerate(FAMILIES)), ids=[one.name for one in FAMILIES]
)
def test_a_family_with_its_published_configuration(
    tmp_path: Path, number: int, family: Family
) -> None:
    """In one format each; as long as the window of most families is beyond any short prompt."""
    write_checkpoint(tmp_path, family, FORMATS[number % len(FORMATS)])
    checks = check_checkpoint(
        tmp_path, prompt_lengths=(40, 150), answer_tokens=12, mlx_lm=family.mlx_lm
    )
    assert checks.problems == []
    assert checks.batches
    assert checks.most_rows == 2
    assert checks.cached_tokens > 0.8 * checks.prompt_tokens


@pytest.mark.parametrize("family", WINDOWED, ids=[one.name for one in WINDOWED])
def test_rows_go_round_their_rings(tmp_path: Path, family: Family) -> None:
    write_checkpoint(tmp_path, family, window_tokens=SMALL_WINDOW)
    checks = check_checkpoint(
        tmp_path, prompt_lengths=(30, 39, 41, 130), answer_tokens=50, mlx_lm=family.mlx_lm
    )
    assert checks.problems == []
    assert checks.window_tokens == SMALL_WINDOW
    assert checks.most_rows == 4
    assert checks.cached_tokens > 0.8 * checks.prompt_tokens
