"""Who may import whom: a gateway host needs no MLX, a policy needs nobody."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ALLOWED = {
    "policies": ("policies",),
    "workers": ("policies", "workers"),
    "gateway": ("policies", "workers.protocol", "gateway"),
}


def imports(path: Path) -> Iterator[str]:
    """Name everything that a file imports, in functions too."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            yield from (f"{module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("package", ALLOWED)
def test_package_imports_only_what_it_may(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in imports(path)
        if name.split(".")[0] in ALLOWED
        and not any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED[package])
    ]
    assert wrong == []


def test_the_load_generator_knows_nothing_of_the_gateway_that_it_measures() -> None:
    assert [
        f"{path.name} imports {name}"
        for path in sorted((ROOT / "gateway" / "loadgen").glob("*.py"))
        for name in imports(path)
        if name.startswith(("gateway", "policies", "workers"))
        and not name.startswith("gateway.loadgen")
    ] == []


def test_gateway_loads_on_a_host_without_mlx() -> None:
    program = """
import sys
for name in ("mlx", "mlx_lm", "mlx_vlm", "transformers", "numpy", "PIL"):
    sys.modules[name] = None
import gateway.cli, gateway.app
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
