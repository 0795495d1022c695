"""Records in memory."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.storage.records import TextsByKind


class MemoryRecords:
    """Records in memory; the tests of `FileRecords` also run against them."""

    remote = False

    def __init__(self) -> None:
        self.shelves: TextsByKind = {}

    def is_current(self, _kind: str) -> bool:
        return True

    async def all(self, kind: str) -> Mapping[str, str]:
        return dict(self.shelves.get(kind, {}))

    async def add(self, kind: str, name: str, text: str) -> bool:
        shelf = self.shelves.setdefault(kind, {})
        new = name not in shelf
        shelf.setdefault(name, text)
        return new

    async def replace(self, kind: str, name: str, text: str) -> None:
        shelf = self.shelves.get(kind, {})
        if name in shelf:
            shelf[name] = text

    async def remove(self, kind: str, name: str) -> None:
        self.shelves.get(kind, {}).pop(name, None)
