"""The policy file: read at the start, and watched from then on for as long as the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

from gateway.config.policy_store import PolicySource, PolicyStore
from gateway.config.policy_versions import (
    Attribution,
    Proposal,
    Reason,
    problems_text,
    propose_yaml,
)
from gateway.errors import StartupError
from policies.document import PolicyInvalid, Problem, default_policy

log = logging.getLogger(__name__)

_LIMIT_BYTES = 1024 * 1024
_BY_FILE = Attribution("file", "the policy file says so")
_SHIPPED = Attribution("paceline", "the policy that comes with Paceline")


def read_source(file: Path | None) -> PolicySource:
    """Read the policy file, or what is shipped where there is none.

    Raise `StartupError` with the file, and the line and field of all that is wrong in it.
    """
    if file is None:
        return PolicySource(Proposal.of(default_policy()), Reason.START, _SHIPPED)
    try:
        return PolicySource(_Look.at(file).proposal(), Reason.FILE, _BY_FILE)
    except PolicyInvalid as invalid:
        raise StartupError(f"The policy {file} is not usable: {problems_text(invalid)}.") from None


class _Look(NamedTuple):
    """What was seen of a file at one moment: its text, or why there is none."""

    text: str
    problem: str = ""

    @classmethod
    def at(cls, file: Path) -> _Look:
        try:
            with file.open("rb") as opened:
                raw = opened.read(_LIMIT_BYTES + 1)
            if len(raw) > _LIMIT_BYTES:
                return cls("", f"the file is larger than {_LIMIT_BYTES} bytes")
            return cls(raw.decode())
        except (OSError, UnicodeDecodeError):
            return cls("", "the file cannot be read")

    def proposal(self) -> Proposal:
        if self.problem:
            raise PolicyInvalid("", (Problem("", self.problem),))
        return propose_yaml(self.text)


class PolicyWatch:
    """Follows the policy file, if there is one."""

    def __init__(self, book: PolicyStore, file: Path | None) -> None:
        self._book = book
        self._file = file
        self._seen: _Look | None = None
        self._judged: _Look | None = None
        self.problem = ""
        """Why what the file says now is not taken; empty where it is, or was."""

    async def look(self) -> None:
        """Look at the file once; to be called once a second."""
        if self._file is None:
            return
        # No deadline: a disk that hangs holds up one thread and nobody else.
        look = await asyncio.to_thread(_Look.at, self._file)
        if look != self._seen:
            self._seen = look  # perhaps half of an edit: it counts once it stays
        elif look != self._judged:
            await self._judge(look)
            self._judged = look

    async def _judge(self, look: _Look) -> None:
        """Take what the file says, or say aloud why not."""
        try:
            proposal = await asyncio.to_thread(look.proposal)
            await self._book.apply_source(proposal, Reason.FILE, _BY_FILE)
        except PolicyInvalid as invalid:
            self.problem = problems_text(invalid)
            log.error("policy.refused file=%s problems=%s", self._file, self.problem)
        else:
            self.problem = ""
