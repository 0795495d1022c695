"""The names that documents, settings and reports of workers have in common."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""The name of a pool, lane or route."""
PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
"""A character without control: names reach terminals, logs and headers."""
MODEL_PATTERN = rf"^{PRINTABLE}{{1,255}}$"
ONE_MODEL_PATTERN = rf"^{PRINTABLE[:-1]}*]{{1,255}}$"
OneModel = Annotated[str, Field(pattern=ONE_MODEL_PATTERN)]
"""The name of a model where an admin could mean several: no name is a pattern."""
ModelName = Annotated[str, Field(pattern=MODEL_PATTERN)]
"""The name of a model: of a repository, with a tag or not, or of a folder, which may have any
letters and spaces."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A label of a worker, such as big, bf16 or lab-2."""


def name_of_host(hostname: str) -> str:
    """Return the name of a host in plain letters, without its domain; empty without any."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", hostname.partition(".")[0]).strip("-")[:50]
