"""docker-compose.yml as Docker reads it, with variables substituted."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
SECRETS = {
    "PACELINE_JOIN_TOKEN": "join-token-of-the-tests",
    "PACELINE_ADMIN_KEY": "admin-key-of-the-tests",
    "PACELINE_API_KEY": "api-key-of-the-tests",
    "GRAFANA_PASSWORD": "password-of-the-tests",
}
_VARIABLE = re.compile(r"\$\{(?P<name>\w+):(?P<kind>[-?])(?P<rest>[^}]*)\}")


def read_compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the file with these variables; fail if a required one is missing."""

    def substitute(match: re.Match[str]) -> str:
        value = variables.get(match["name"])
        if match["kind"] == "?":
            assert value, match["rest"]
        return value or match["rest"]

    return yaml.safe_load(_VARIABLE.sub(substitute, FILE.read_text()))


def required_variables() -> set[str]:
    return {match["name"] for match in _VARIABLE.finditer(FILE.read_text()) if match["kind"] == "?"}


SERVICES: dict[str, Any] = read_compose(SECRETS)["services"]
