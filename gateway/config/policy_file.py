"""The policy file: read at the start, and checked for changes once a second."""

from __future__ import annotations

import asyncio
import functools
import logging
from pathlib import Path
from typing import NamedTuple

from gateway.config.policy_store import PolicyStore
from gateway.config.policy_versions import Attribution, Proposal, Reason
from gateway.errors import StartupError
from gateway.storage.disk_thread import DiskThread
from policies.document import PolicyInvalid, Problem, default_text

log = logging.getLogger(__name__)

_LIMIT_BYTES = 1024 * 1024
_BY_FILE = Attribution("file", "from the policy file", Reason.FILE)
_SHIPPED = Attribution("paceline", "the policy shipped with Paceline", Reason.START)


def read_source(file: Path | None) -> tuple[Proposal, Attribution]:
    """Return the policy of the file, or the shipped one if `file` is None.

    Raise `StartupError` with the line and field of every problem.
    """
    if file is None:
        return Proposal.from_yaml(default_text()), _SHIPPED
    try:
        return _FileContent.read(file).proposal(), _BY_FILE
    except PolicyInvalid as invalid:
        raise StartupError(f"The policy {file} is invalid: {invalid.reasons}.") from None


class PolicyFileWatcher:
    """Applies changes of the policy file, if there is one."""

    def __init__(self, policy_store: PolicyStore, file: Path | None) -> None:
        self._policy_store = policy_store
        self._file = file
        self._disk = DiskThread("policy file")
        self._last_read: _FileContent | None = None
        self._last_applied: _FileContent | None = None
        self.problem = ""
        """Why the present content was rejected; empty if it was not."""

    async def check(self) -> None:
        """Read the file once, and apply a change; called once a second."""
        if self._file is None:
            return
        try:
            content = await self._disk.run(functools.partial(_FileContent.read, self._file))
        except TimeoutError:
            content = _UNREADABLE
        if content != self._last_read:
            self._last_read = content  # perhaps half an edit: applied if unchanged next time
        elif content != self._last_applied:
            try:
                proposal = await asyncio.to_thread(content.proposal)
                await self._policy_store.apply_source(proposal, _BY_FILE)
                self.problem = ""
            except PolicyInvalid as invalid:
                self.problem = invalid.reasons
                log.error("policy_file.rejected file=%s problems=%s", self._file, self.problem)
            self._last_applied = content


class _FileContent(NamedTuple):
    """The text of a file at one moment, or why it cannot be read."""

    text: str
    problem: str = ""

    @classmethod
    def read(cls, file: Path) -> _FileContent:
        try:
            with file.open("rb") as opened:
                content = opened.read(_LIMIT_BYTES + 1)
            if len(content) > _LIMIT_BYTES:
                return cls("", f"the file is larger than {_LIMIT_BYTES} bytes")
            return cls(content.decode())
        except (OSError, UnicodeDecodeError):
            return _UNREADABLE

    def proposal(self) -> Proposal:
        if self.problem:
            raise PolicyInvalid("", (Problem("", self.problem),))
        return Proposal.from_yaml(self.text)


_UNREADABLE = _FileContent("", "the file cannot be read")
