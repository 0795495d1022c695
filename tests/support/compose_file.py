"""docker-compose.yml as Docker reads it: services, with what is left to the environment put in."""

from __future__ import annotations

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


def read_compose(given: Mapping[str, str]) -> dict[str, Any]:
    """Read the whole file with these variables; fail on one that is missing."""

    def put_in(found: re.Match[str]) -> str:
        value = given.get(found["name"])
        if found["kind"] == "?":
            assert value, found["rest"]
        return value or found["rest"]

    whole: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(put_in, FILE.read_text()))
    return whole


def required_variables() -> set[str]:
    """Name the variables that have no default."""
    return {found["name"] for found in _VARIABLE.finditer(FILE.read_text()) if found["kind"] == "?"}


SERVICES: dict[str, Any] = read_compose(SECRETS)["services"]
