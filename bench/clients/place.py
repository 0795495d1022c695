"""Where a client works: a running line, a folder of its own, and the line's own counts."""

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
    """A client did not do what it is for; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """All that a client is given."""

    url: str
    model: str
    checkpoint: Path
    """The model's folder, for clients that want its tokenizer."""
    folder: Path

    def run(
        self,
        *command: str | Path,
        stdin: str = "",
        good: tuple[int, ...] = (0,),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Run a command here and return what it printed; raise `ClientFailed` if it fails."""
        try:
            done = subprocess.run(
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
            raise ClientFailed(f"was not done after {_TIME_LIMIT_S:.0f} s") from None
        except OSError as error:
            raise ClientFailed(f"does not start: {error.strerror}") from None
        if done.returncode not in good:
            printed = (done.stdout + done.stderr).splitlines()
            lines = [line for raw in printed if (line := raw.strip(" │╭╰─╮╯"))]
            raise ClientFailed(f"ended with {done.returncode}: {' / '.join(lines[-5:])[:400]}")
        return done.stdout or done.stderr

    def metrics(self) -> str:
        """Return the line's own /metrics."""
        return httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text

    def drafts(self) -> Drafts:
        """Return what the line itself has counted of drafts."""
        return Drafts.of_exposition(self.metrics()) or Drafts()
