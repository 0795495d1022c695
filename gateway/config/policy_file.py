"""The policy file: read at the start, and checked for changes once a second.

The state folder keeps what this gateway last read, so that a restart is no change of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from pathlib import Path
from typing import NamedTuple

from gateway.config.policy_store import PolicyStore
from gateway.config.policy_versions import Attribution, PolicyVersion, Proposal, Reason
from gateway.errors import RecordsUnwritable, StartupError
from gateway.state.disk_thread import DiskThread
from gateway.state.records import FileRecords
from policies.document import PolicyInvalid, Problem, default_text

log = logging.getLogger(__name__)

_LIMIT_BYTES = 1024 * 1024
_KIND = "policy_file"
_BY_FILE = Attribution("file", "from the policy file", Reason.FILE)
_SHIPPED = Attribution("paceline", "the policy shipped with Paceline", Reason.START)


def read_source(
    file: Path | None, last_read: PolicyVersion | None = None
) -> tuple[Proposal, Attribution]:
    """Return the policy of the file, or the shipped one if `file` is None.

    The shipped one also replaces a file that was valid when it was `last_read`, by an older
    Paceline; the newest stored version that is still valid replaces both. Raise `StartupError` with
    the line and field of every problem of any other file.
    """
    if file is not None:
        content = _FileContent.read(file)
        try:
            return content.proposal(), _BY_FILE
        except PolicyInvalid as invalid:
            if last_read is None or content.text != last_read.text:
                raise StartupError(f"The policy {file} is invalid: {invalid.reasons}.") from None
    return Proposal.from_yaml(default_text()), _SHIPPED


class LastReads:
    """The content that this gateway last read from its policy file, in the state folder."""

    def __init__(self, folder: Path, file: Path | None) -> None:
        self._records = FileRecords(folder / "policy-files.json")
        self._name = str(file and file.absolute())  # gateways may share the folder
        self.last: PolicyVersion | None = None
        """The version that had this content; None if unknown."""

    async def open(self) -> None:
        """Read what an earlier process kept."""
        with contextlib.suppress(RecordsUnwritable, ValueError):  # the records log it
            text = (await self._records.all(_KIND)).get(self._name)
            self.last = PolicyVersion.model_validate_json(text) if text else None

    async def keep(self, version: PolicyVersion | None, proposal: Proposal) -> None:
        """Keep what was read, unless no version has it yet."""
        if version is None or (self.last is not None and self.last.holds(proposal)):
            return
        content = {"document": proposal.document, "text": proposal.text}
        self.last = version.model_copy(update=content)
        text = self.last.model_dump_json()
        # Without it, only new content applies after a restart.
        with contextlib.suppress(RecordsUnwritable):
            if not await self._records.add(_KIND, self._name, text):
                await self._records.replace(_KIND, self._name, text)


class PolicyFileWatcher:
    """Applies changes of the policy file, if there is one."""

    def __init__(self, policy_store: PolicyStore, file: Path | None, reads: LastReads) -> None:
        self._policy_store = policy_store
        self._file = file
        self._reads = reads
        self._disk = DiskThread("policy file")
        self._last_read: _FileContent | None = None
        self._last_applied: _FileContent | None = None
        self.rejection = ""
        """Why the present content was rejected; empty if it was not."""

    @property
    def problem(self) -> str:
        """Return why the present content is not in force; empty if it is."""
        version, read = self._policy_store.version, self._reads.last
        if self.rejection or self._file is None or read is None or version.holds(read):
            return self.rejection
        return (
            f"version {version.number} of the policy, by {version.author}, has other content than "
            f"the file; edit the file, or roll back to version {read.number}, to apply it"
        )

    async def apply(self, proposal: Proposal) -> None:
        """Apply the content of the file if it is new, and keep that it was read."""
        version = await self._policy_store.apply_source(proposal, _BY_FILE, self._reads.last)
        await self._reads.keep(version, proposal)
        self.rejection = ""
        if self.problem:
            log.warning("policy_file.ignored file=%s why=%s", self._file, self.problem)

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
                await self.apply(proposal)
            except PolicyInvalid as invalid:
                self.rejection = invalid.reasons
                log.error("policy_file.rejected file=%s problems=%s", self._file, self.rejection)
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
