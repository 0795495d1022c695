"""The workspace of a client: a running gateway, a folder and the counters of the gateway."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import httpx

from gateway.loadgen.drafts import Drafts

_TIME_LIMIT_S: Final = 300.0
_ENVIRONMENT: Final = {"DO_NOT_TRACK": "1", "COLUMNS": "200"}
QUESTION: Final = "Count from 1 to 20."


class ClientFailed(Exception):
    """A client failed at its task; the message contains the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Everything that a client uses."""

    url: str
    model: str
    checkpoint: Path
    """The model's folder, for clients that want its tokenizer."""
    folder: Path

    def run(
        self,
        *command: str | Path,
        stdin: str = "",
        expected_codes: tuple[int, ...] = (0,),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Run a command in the folder and return its output; raise `ClientFailed` if it fails."""
        try:
            process = subprocess.run(
                [str(word) for word in command],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=_TIME_LIMIT_S,
                cwd=self.folder,
                env={**os.environ, **_ENVIRONMENT, "HOME": str(self.folder), **environment},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ClientFailed(f"timed out after {_TIME_LIMIT_S:.0f} s") from None
        except OSError as error:
            raise ClientFailed(f"does not start: {error.strerror}") from None
        if process.returncode not in expected_codes:
            printed = (process.stdout + process.stderr).splitlines()
            lines = [line for raw in printed if (line := raw.strip(" │╭╰─╮╯"))]
            raise ClientFailed(f"ended with {process.returncode}: {' / '.join(lines[-5:])[:400]}")
        return process.stdout or process.stderr

    def metrics(self) -> str:
        """Return the /metrics of the gateway."""
        return httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text

    def drafts(self) -> Drafts:
        """Return the draft counters of the gateway."""
        return Drafts.of_exposition(self.metrics()) or Drafts()
