"""The snippets of the README run unchanged."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_snippets_of_the_readme_run_unchanged(demo, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = "\n".join(snippets).replace("http://127.0.0.1:8000", demo.url)
    printed = io.StringIO()
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    names["client"].close()  # type: ignore[attr-defined]
    output = printed.getvalue()
    numbers = ", ".join(map(str, range(1, 21))) + "."
    assert output.count(numbers) == 1
    assert "red" in output
    assert float(output.splitlines()[1]) > 0.5
