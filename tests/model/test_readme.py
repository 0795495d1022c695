"""The README's snippets, pasted as they stand."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.support.paceline_process import UpProcess

ROOT = Path(__file__).parents[2]


def test_snippets_of_the_readme_run_as_they_stand(
    up: UpProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = "\n".join(snippets).replace("http://127.0.0.1:8000", up.url)
    printed = io.StringIO()
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    names["client"].close()  # type: ignore[attr-defined]
    shown = printed.getvalue()
    counted = ", ".join(map(str, range(1, 21))) + "."
    assert shown.count(counted) == 2
    assert "red" in shown
    assert float(shown.splitlines()[1]) > 0.5
