"""The routes that the packages of OpenAI and Anthropic call, read from their sources."""

import re
from pathlib import Path
from types import ModuleType

# As `self._get(path_template("/a/{b}", b=b))` or `self._get("/a")`.
_CALL = re.compile(
    r'\._(get|get_api_list|post|put|patch|delete)\(\s*(?:\w+\(\s*)?f?"([^"?]*)[^"]*"'
)


def sdk_routes(package: ModuleType, prefix: str) -> list[tuple[str, str]]:
    """Return the method and the path template of each route, once."""
    folder = Path(str(package.__file__)).parent / "resources"
    calls = (call for file in folder.rglob("*.py") for call in _CALL.findall(file.read_text()))
    return sorted({(name.partition("_")[0].upper(), prefix + path) for name, path in calls})
